"""An OpenEnv server with products and a calculator: `python server.py 8000`."""

from __future__ import annotations

import re
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Turn(Action):
    """A turn of the model."""

    text: str


class Message(Observation):
    """What the model gets."""

    text: str = ""


class Calculator(Environment):
    """Answers `<tool>12*7</tool>` with the value, and rewards any other turn if it is right."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._answer = ""

    def reset(
        self, seed: Any = None, episode_id: Any = None, answer: str = "", **_: Any
    ) -> Message:
        """Begin a conversation whose right answer is given."""
        self._answer = answer
        return Message()

    def step(self, action: Turn, timeout_s: Any = None, **_: Any) -> Message:
        """Evaluate a call, or reward the answer."""
        if "<tool>" in action.text:
            call = re.search(r"<tool>(\d{1,9})\*(\d{1,9})</tool>", action.text)
            text = "error" if call is None else str(int(call[1]) * int(call[2]))
            return Message(text=text, reward=0.0)
        is_right = action.text.strip() == f"#### {self._answer}"
        return Message(reward=float(is_right), done=True)

    @property
    def state(self) -> State:
        """The state that the protocol requires."""
        return self._state


app = create_app(Calculator, Turn, Message, env_name="calculator", max_concurrent_envs=256)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
