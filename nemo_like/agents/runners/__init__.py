"""Programs that run environments of other ecosystems, one module each.

They run in the interpreter of the user (`environment.python`), which has the packages of the
ecosystem, and import nothing else of this package.
"""
