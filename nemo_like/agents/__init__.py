"""Agents: programs that call an OpenAI-compatible endpoint, recorded as token ids.

An episode is one run of a program on one row of data. Each sampled answer is a call. The calls of
an episode become one or more training rows, in which each sampled token is trained exactly once.
"""
