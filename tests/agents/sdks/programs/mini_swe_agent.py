"""The default agent of mini-swe-agent in this directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.update(
    MSWEA_SILENT_STARTUP="1",
    MSWEA_GLOBAL_CONFIG_DIR=os.environ["TMPDIR"],
    LITELLM_LOCAL_MODEL_COST_MAP="True",
)

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

question = json.loads(Path(os.environ["NEMO_LIKE_TASK"]).read_text())["prompt"]
model = LitellmModel(model_name="openai/m", cost_tracking="ignore_errors")
agent = DefaultAgent(
    model,
    LocalEnvironment(),
    system_template="Use the tool bash.",
    instance_template="{{task}}",
    step_limit=5,
)
print("RESULT", agent.run(question))
