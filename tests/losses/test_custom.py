"""Losses of the user by import path: the contract, and one message for what breaks it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nemo_like.config.errors import ConfigError
from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.losses import GlobalCounts, LossInputs, LossTerms, TensorMean, rollout_loss
from nemo_like.losses.policy_gradient import CustomLoss, load_custom_loss
from nemo_like.losses.reduce import token_weights

HERE = "tests.losses.test_custom"


@dataclass(frozen=True, kw_only=True)
class SquaredLoss:
    """The squared log-prob times the advantage and `scale`."""

    scale: float = 1.0
    uses_sampling_distribution: bool = True
    needs_entropy: bool = False
    entropy_gradient: bool = False

    def denominator(self, counts: GlobalCounts) -> float:
        return counts.denominator("token")

    def coupled_rows(self, inputs: LossInputs) -> None:
        return None

    def __call__(self, inputs: LossInputs) -> LossTerms:
        weights = token_weights(inputs, "token")
        losses = self.scale * inputs.per_token("advantages") * inputs.policy_logprobs.square()
        loss_sum = (weights * losses).sum()
        return LossTerms(loss_sum, {"policy/loss": TensorMean(loss_sum.detach(), weights.sum())})


def make_squared(scale: float, power: int = 2) -> SquaredLoss:
    assert power == 2, "power is 2"
    return SquaredLoss(scale=scale)


def make_number(**options: Any) -> float:
    return 1.0


def make_local(**options: Any) -> Any:
    class Local(SquaredLoss):
        pass

    return Local()


@dataclass(frozen=True)
class WithoutTerms(SquaredLoss):
    """Returns a tensor instead of terms."""

    def __call__(self, inputs: LossInputs) -> Any:
        return inputs.policy_logprobs.sum()


def example() -> LossInputs:
    return LossInputs(
        policy_logprobs=torch.tensor([-1.0, -2.0], requires_grad=True),
        token_mask=torch.ones(2, dtype=torch.bool),
        row_ids=torch.zeros(2, dtype=torch.long),
        row_num_tokens=torch.tensor([2.0]),
        row_columns={"advantages": torch.tensor([3.0])},
    )


@pytest.mark.parametrize("name", ["SquaredLoss", "make_squared"])
def test_a_class_and_a_function_get_the_options_as_keyword_arguments(name: str) -> None:
    config = PolicyGradientLossConfig(
        path=f"{HERE}.{name}", options={"scale": 0.5}, logprobs=("reference_logprobs",)
    )
    loss = rollout_loss(config, max_new_tokens=8)
    assert isinstance(loss, CustomLoss)
    assert loss.logprob_names == ("reference_logprobs",)
    assert float(loss(example()).loss_sum.detach()) == 0.5 * 3.0 * (1 + 4)
    assert loss.denominator(GlobalCounts(num_tokens=2, num_rows=1)) == 2.0
    assert pickle.loads(pickle.dumps(loss.for_num_steps(3))) == loss


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("Squared", {}, r"has no 'Squared'; it has .*SquaredLoss"),
        ("HERE", {}, "a str that cannot be called; name a function of one keyword argument for"),
        ("SquaredLoss", {"scales": 1.0}, r"as keyword arguments failed with TypeError: .*scales"),
        ("make_squared", {"scale": 1.0, "power": 3}, "failed with AssertionError: power is 2"),
        ("make_number", {}, "returned a float without uses_sampling_distribution, needs_entropy"),
        ("make_local", {}, "cannot be sent to the workers: .*top level of its module"),
    ],
)
def test_what_is_no_loss_is_one_message(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        load_custom_loss(f"{HERE}.{name}", options)
    assert str(caught.value).startswith(f"loss_fn.path is '{HERE}.{name}'")


def test_a_module_that_does_not_exist_names_python_path() -> None:
    with pytest.raises(ConfigError, match=r"importing 'no_such_losses' failed .*PYTHONPATH"):
        load_custom_loss("no_such_losses.Mine", {})


def test_a_result_that_is_no_loss_terms_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"WithoutTerms of loss_fn.path returned a Tensor; return"):
        CustomLoss(loss=WithoutTerms())(example())


@dataclass(frozen=True, kw_only=True)
class CouplingLoss(SquaredLoss):
    """Claims that its rows belong together."""

    def coupled_rows(self, inputs: LossInputs) -> Any:
        return torch.zeros(1, dtype=torch.long)


def test_a_loss_that_couples_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"CouplingLoss of loss_fn\.path couples rows"):
        CustomLoss(loss=CouplingLoss())(example())
