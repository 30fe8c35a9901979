"""The arguments of `BatchedDataDict.shard_by_batch_size`, with NeMo RL's keys, as a `PlanSpec`."""

# No postponed annotations here: `__required_keys__` ignores `NotRequired` in strings.
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

from nemo_like.data.planning.plan import PlanSpec


class DynamicBatchingArgs(TypedDict):
    """Rows of similar length padded to microbatches under a token limit."""

    max_tokens_per_microbatch: int
    """Maximum tokens of a microbatch, rows x padded length."""
    sequence_length_round: int
    """The padded length of a microbatch is a multiple of this."""
    input_key: str
    """The column of token ids."""
    input_lengths_key: str
    """The column of row lengths, [B]."""


class SequencePackingArgs(TypedDict):
    """Rows packed to microbatches under a token limit."""

    max_tokens_per_microbatch: int
    """Maximum tokens of a microbatch: the bin capacity."""
    input_key: str
    """The column of token ids."""
    input_lengths_key: str
    """The column of row lengths, [B]."""
    algorithm: str
    """Name of the bin packer, see `PackingAlgorithm`."""
    sequence_length_pad_multiple: int
    """Row lengths are rounded up to a multiple of this."""
    microbatch_order: NotRequired[Literal["packer", "largest_first"]]
    """Default: `packer`."""


def packing_spec(args: SequencePackingArgs, num_ranks: int, global_batch_size: int) -> PlanSpec:
    """Return the spec of packed microbatches. Raises ValueError for a missing or unknown key."""
    _check_keys("sequence_packing_args", args, SequencePackingArgs)
    return PlanSpec(
        layout="packed",
        max_tokens=args["max_tokens_per_microbatch"],
        num_ranks=num_ranks,
        global_batch_size=global_batch_size,
        algorithm=args["algorithm"],
        sequence_length_round=args["sequence_length_pad_multiple"],
        microbatch_order=args.get("microbatch_order", "packer"),
    )


def dynamic_spec(args: DynamicBatchingArgs, num_ranks: int, global_batch_size: int) -> PlanSpec:
    """Return the spec of padded microbatches. Raises ValueError for a missing or unknown key."""
    _check_keys("dynamic_batching_args", args, DynamicBatchingArgs)
    return PlanSpec(
        layout="padded",
        max_tokens=args["max_tokens_per_microbatch"],
        num_ranks=num_ranks,
        global_batch_size=global_batch_size,
        sequence_length_round=args["sequence_length_round"],
    )


def _check_keys(name: str, args: Mapping[str, Any], kind: Any) -> None:
    # A misspelled optional key would be ignored otherwise.
    missing = sorted(kind.__required_keys__ - set(args))
    unknown = sorted(set(args) - set(kind.__annotations__))
    if missing or unknown:
        raise ValueError(
            f"{name}: missing keys {missing}, unknown keys {unknown}; the keys are"
            f" {sorted(kind.__annotations__)}"
        )
