"""What front, leader and followers say to each other: typed messages, msgpack on the wire."""

from __future__ import annotations

import msgspec

from .sampling_params import SamplingParams


class Request(msgspec.Struct, tag=True):
    """Front -> leader: generate from `prompt_ids`. The seed in `sampling` is set: the front has drawn one if need be.

    `grammar` is what llguidance understands; the answer follows it.
    """

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    eos_ids: list[int]
    grammar: str | None = None


class Abort(msgspec.Struct, tag=True):
    """Front -> leader: forget a request. Unknown ids are ignored: the request may just have finished."""

    id: str


class ClearCache(msgspec.Struct, tag=True):
    """Front -> leader: no prefix of an earlier request may be found any more."""


class MeasureMemory(msgspec.Struct, tag=True):
    """Front -> leader, who passes it on: every rank answers with a MemoryReport."""


class AskMemory(msgspec.Struct, tag=True):
    """Front -> leader, who passes it on: every rank answers with a RankMemory, between two steps and at no cost."""


class MeasureCeiling(msgspec.Struct, tag=True):
    """Front -> leader, who passes it on: every rank answers with a CeilingReport."""


class MeasureCollectives(msgspec.Struct, tag=True):
    """Front -> leader, who passes it on: every rank answers with a CollectiveReport of a decode step of `batch`."""

    batch: int


class Stop(msgspec.Struct, tag=True):
    """Front -> leader, who passes it on: finish and exit together."""


class SequenceStep(msgspec.Struct, array_like=True):
    """One sequence's part of a step.

    `slot` is its row in the per-sequence device state. Tokens [start, start + n) are computed: `token_ids`, or the one
    token that was sampled last when that is empty. `sample` says whether the last of them is sampled from. `tables`
    are its blocks, a list per cache group. `score`: the logits of all its tokens are wanted.
    """

    slot: int
    start: int
    token_ids: list[int]
    prompt_len: int
    sample: bool
    tables: list[list[int]]
    score: bool = False

    @property
    def logit_tokens(self) -> range:
        """Which of its new tokens' logits are wanted."""
        return range(0 if self.score else self.num_tokens - self.sample, self.num_tokens)

    @property
    def num_tokens(self) -> int:
        """New tokens of this step."""
        return len(self.token_ids) or 1


class Step(msgspec.Struct, tag=True):
    """Leader -> followers: one forward pass. `greedy`: the likeliest tokens are taken, whatever the ranks find."""

    sequences: list[SequenceStep]
    greedy: bool = False


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Natural-log probabilities of one sampled token and of the likeliest ones, from the unmodified logits."""

    chosen: float
    top_ids: list[int]
    top: list[float]


class TokenOutput(msgspec.Struct, array_like=True):
    """One new token of a request. `finish_reason` is 'stop' or 'length' with its last token; a stop token is included.

    `prompt`: with the first token, what was asked to be known of the prompt's tokens from the second on.
    """

    id: str
    token_id: int
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt: list[TokenLogprobs] | None = None


class Tokens(msgspec.Struct, tag=True):
    """Leader -> front: what a step produced."""

    outputs: list[TokenOutput]


class RequestFailed(msgspec.Struct, tag=True):
    """Leader -> front: a request that cannot be run; the ranks are fine."""

    id: str
    message: str


class Stage(msgspec.Struct, tag=True):
    """Rank -> front: a stage of start-up begins."""

    rank: int
    name: str


class AxisInfo(msgspec.Struct):
    """A mesh axis: its ranks, the backend of its collectives and why it is that one."""

    axis: str
    size: int
    backend: str
    reason: str = ""


class Notice(msgspec.Struct, tag=True):
    """Rank -> front: something a user should know of; the rank goes on."""

    text: str


class Ready(msgspec.Struct, tag=True):
    """Rank -> front: loaded and warm. Bytes and seconds are measured; `kv_cache_tokens` is what the cache holds.

    `device_*` are the device's (the host's, on the CPU) as a whole.
    """

    rank: int
    pid: int
    device: str
    weight_bytes: int
    kv_cache_tokens: int
    max_model_len: int
    load_seconds: float
    device_used_bytes: int = 0
    device_total_bytes: int = 0
    axes: list[AxisInfo] = []


class MemoryReport(msgspec.Struct, tag=True):
    """Rank -> front: memory as measured after a forward pass, in bytes (see runtime/memory.py)."""

    rank: int
    weight_bytes: int
    device_used_bytes: int
    device_free_bytes: int
    device_total_bytes: int
    kv_cache_tokens: int
    kv_cache_bytes: int


class RankMemory(msgspec.Struct, tag=True):
    """Rank -> front: what it holds now, in bytes. `private_bytes` is the process's own host memory, `device_*` the
    device's (the host's, on the CPU) as a whole."""

    rank: int
    weight_bytes: int
    private_bytes: int
    device_used_bytes: int
    device_total_bytes: int


class CeilingReport(msgspec.Struct, tag=True):
    """Rank -> front: what its device can do at best (see runtime/ceiling.py), both a second."""

    rank: int
    copy_bytes_per_s: float
    product_flops: float


class LinkInfo(msgspec.Struct):
    """A link between two GPUs: NVLink (with its lanes), PCIe or unknown, and what writing over it showed.

    `peer_access`: the driver lets one map the other's memory. `bandwidth`: bytes a second of a large copy.
    """

    source: int
    target: int
    kind: str
    num_links: int | None
    peer_access: bool
    written: bool
    bandwidth: float


class CollectiveFigure(msgspec.Struct):
    """An all-reduce of `size` bytes over `world` ranks: seconds of the slowest rank, bytes a second, sum checked."""

    backend: str
    size: int
    world: int
    latency: float
    bandwidth: float
    verified: bool


class DeviceReport(msgspec.Struct, tag=True):
    """Rank -> front: what a rank found out about its device, and rank 0 about the collectives of all.

    `faults` are backends that cannot be used here, with the reason.
    """

    rank: int
    device: str
    total_bytes: int
    torch_version: str
    nccl_version: str | None
    driver_version: str | None
    links: list[LinkInfo]
    collectives: list[CollectiveFigure]
    axis: AxisInfo | None
    faults: dict[str, str]


class CollectiveCost(msgspec.Struct, array_like=True):
    """A kind of collective: how often a step has it, and the seconds of one."""

    operation: str
    shape: list[int]
    dtype: str
    count: int
    seconds: float


class CollectiveReport(msgspec.Struct, tag=True):
    """Rank -> front: the collectives of a decode step."""

    rank: int
    costs: list[CollectiveCost]


class Stats(msgspec.Struct, tag=True):
    """Leader -> front: how busy the engine is, a few times a second and whenever it runs out of work.

    Blocks are those of all cache groups together; one that only could be found again counts as free. `step_seconds`
    are the durations of the steps since the last report, `queue_seconds` how long the sequences waited that were
    admitted since; tokens and preemptions count from the start.
    """

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    step_seconds: list[float]
    queue_seconds: list[float]


class Failed(msgspec.Struct, tag=True):
    """Rank -> front: this rank cannot go on. `collective` marks a failure that another rank may have caused."""

    rank: int
    stage: str
    message: str
    hint: str
    exit_code: int
    collective: bool


Measure = AskMemory | MeasureMemory | MeasureCeiling | MeasureCollectives
FrontMessage = Request | Abort | ClearCache | Measure | Stop
StepMessage = Step | Measure | Stop
Report = MemoryReport | RankMemory | CeilingReport | CollectiveReport | DeviceReport
RankMessage = Stage | Notice | Ready | Tokens | RequestFailed | Report | Stats | Failed
