"""YAML files and command-line overrides become plain frozen dataclasses; every error names the key
and the line.
"""
