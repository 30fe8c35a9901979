"""Distillation: a student learns the next-token distributions of one or several teachers."""
