"""What every forked process of the tests has imported when it starts, see tests/conftest.py."""

import gc

import tests.policy.megatron.ranks  # noqa: F401

# Garbage collections of the forked processes skip these objects: a million of them, which would be
# read each time, and copied because reading them counts references.
gc.collect()
gc.freeze()
