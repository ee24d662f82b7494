"""A step enters few functions of other files in ``device/``: a reader who follows a plan has to visit each of them.

CUDA graphs are replaced (``eager_graphs.py``): what one captures counts as if each replay ran it.
"""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import strandline.device
from strandline import LLM, SamplingParams
from strandline.device.drafters import draft_layer
from strandline.device.runner import Runner
from strandline.device.steps.step_in_flight import StepInFlight
from strandline.device.uni_executor import UniExecutor
from tests.cpu.engine.eager_graphs import complete_on_device, replay_eagerly, single_rows_on_the_host
from tests.cpu.engine.small_demo import small_demo

MAX_NUM_SEQS, NUM_DRAFTS = 4, 2
DEVICE, TESTS = Path(strandline.device.__file__).parent, Path(__file__).parents[2]
LEFT_OUT = ("stores", "ranks", "cache_actions.py", "encoded_pictures.py", "sampling_state.py", "threads.py")
"""What comes before a step or is no part of it, and the states of requests."""


class Trace:
    """Records the functions of ``device/`` that steps enter from another file, directly or through other packages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.functions = set[CodeType]()
        for owner, name in ((Runner, "launch"), (StepInFlight, "result")):
            monkeypatch.setattr(owner, name, self._traced(getattr(owner, name)))

    def _traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any) -> Any:
            sys.setprofile(self._record)
            try:
                return function(*args)
            finally:
                sys.setprofile(None)

        return traced

    def _record(self, frame: FrameType, event: str, arg: object) -> None:
        entered, caller = frame.f_code, frame.f_back
        if event != "call" or not is_visited(entered):
            return
        while caller is not None and (caller.f_code.co_filename == __file__ or not is_ours(caller.f_code)):
            caller = caller.f_back
        if caller is not None and is_visited(caller.f_code) and caller.f_code.co_filename != entered.co_filename:
            self.functions.add(entered)

    @property
    def names(self) -> list[str]:
        """The functions but properties, which a reader takes for fields."""
        modules = [module for name, module in sys.modules.items() if name.startswith(strandline.device.__name__)]
        classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
        members = [member for each in classes for member in vars(each).values()]
        properties = {member.fget.__code__ for member in members if isinstance(member, property) and member.fget}
        return sorted(each.co_qualname for each in self.functions - properties)


@cache
def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith((f"{DEVICE}/", f"{TESTS}/"))


@cache
def is_visited(code: CodeType) -> bool:
    """Whether a function belongs to a step, and to no stand-in of a test."""
    path = Path(code.co_filename)
    is_left_out = any(part in LEFT_OUT for part in path.parts)
    return path.is_relative_to(DEVICE) and not is_left_out and not code.co_name.startswith("<")


@pytest.mark.parametrize(("num_drafts", "most"), [(0, 36), (NUM_DRAFTS, 40)])
def test_replayed_steps_enter_few_functions_of_other_files(
    num_drafts: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_layer, "single_rows", single_rows_on_the_host)
    drafts = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    llm = LLM(
        small_demo(), memory="64MiB", dtype="float32", device="cpu", max_num_seqs=MAX_NUM_SEQS, async_scheduling=True,
        speculative_config=drafts if num_drafts else None,
    )  # fmt: skip
    executor = llm.engine.core.executor
    assert isinstance(executor, UniExecutor)
    max_model_len = llm.engine.core.limits.max_model_len
    replay_eagerly(executor.runner, num_drafts, MAX_NUM_SEQS, max_model_len, replays_plain=True)
    if num_drafts:
        complete_on_device(llm.engine.scheduler.drafts)
    trace = Trace(monkeypatch)
    options: list[dict[str, Any]] = [
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.7, "seed": 1, "logit_bias": {7: 1.0}},
        {"temperature": 0.7, "seed": 2, "presence_penalty": 1.0},
    ]
    params = [SamplingParams(max_tokens=4, ignore_eos=True, **each) for each in options]
    for some in (params[:2], params):
        llm.generate(["What is seven times eight?"] * len(some), some, use_tqdm=False)
    assert "CapturedStep.finish" in trace.names
    assert 30 < len(trace.names) < most, trace.names
