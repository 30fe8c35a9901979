"""An OpenEnv server with a guessing game: `python server.py 8000`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A guess."""

    number: int


class Hint(Observation):
    """What the player sees."""

    text: str = ""


class Game(Environment):
    """Rewards the guess that equals a number, and gives hints for all others."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(
        self, seed: Any = None, episode_id: Any = None, number: int | str = 7, **_: Any
    ) -> Hint:
        """Begin a game with a number from 1 to 16."""
        self._number = int(number)
        return Hint(text="1-16")

    def step(self, action: Guess, timeout_s: Any = None, **_: Any) -> Hint:
        """Compare a guess with the number."""
        if action.number == self._number:
            return Hint(text="right", reward=1.0, done=True)
        return Hint(text="higher" if action.number < self._number else "lower", reward=0.0)

    @property
    def state(self) -> State:
        """The state that the protocol requires."""
        return self._state


app = create_app(Game, Guess, Hint, env_name="guess", max_concurrent_envs=256)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
