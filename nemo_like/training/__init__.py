"""Run management: workers, resume, logging, evaluation, saving."""
