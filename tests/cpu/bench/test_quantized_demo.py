"""The demo model in FP8, written as the documentation says: it keeps its exam, and its perplexity hardly changes."""

import re
import shlex
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks import perplexity
from strandline import LLM, SamplingParams
from strandline.bench import exam
from strandline.cli import main
from strandline.demo.tasks import KINDS, make_task

PAGE = Path(__file__).parents[3] / "docs" / "quantization.md"
PER_KIND = 34
"""Tasks of each kind: one wrong answer among all is less than a point."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("converted") / "demo-fp8"
    assert main(["quantize", "demo", "--output", str(output)]) == 0
    return output


@pytest.mark.parametrize(
    ("mode", "kv_cache_dtype"),
    [
        ("resumed", "fp8"),
        *(pytest.param(mode, "auto", marks=pytest.mark.long) for mode in exam.MODES),
    ],
)
def test_demo_model_keeps_its_exam_within_a_point(converted: Path, mode: str, kv_cache_dtype: str) -> None:
    suite = [make_task(kind, Random(seed), num_tokens=100 + 15 * seed) for kind in KINDS for seed in range(PER_KIND)]
    options: dict[str, Any] = {"dtype": "float32", "memory": "64MiB", "kv_cache_dtype": kv_cache_dtype}
    llm = LLM(str(converted), enable_prefix_caching=mode != "off", **options)
    result = exam.take(llm, suite, mode)
    num_correct = sum(result.correct(suite, kind) for kind in KINDS)
    assert num_correct >= 0.99 * len(suite)
    assert (result.hit_share > 0.1) == (mode == "resumed")


def test_draft_layer_is_read_from_fp8(converted: Path) -> None:
    llm = LLM(
        str(converted),
        dtype="float32",
        memory="64MiB",
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    )
    report = llm.engine.core.executor.runner.model.weights_report  # type: ignore[attr-defined]
    assert (report.num_quantized, report.skipped) == (57, {})
    plain = LLM(str(converted), dtype="float32", memory="64MiB")
    params = SamplingParams(temperature=0, max_tokens=30)
    outputs = [x.generate(["Return a list of"], params, use_tqdm=False)[0].outputs[0].text for x in (llm, plain)]
    assert outputs[0] == outputs[1]


def test_perplexity_changes_by_less_than_a_percent(converted: Path) -> None:
    rows: list[list[int]] = []
    scores = []
    for model in ("demo", str(converted)):
        llm = LLM(model, dtype="float32", memory="64MiB", enable_prefix_caching=False)
        rows = rows or perplexity.make_rows(llm, perplexity.demo_texts(llm, per_kind=3), 300)
        scores.append(perplexity.score(llm, rows))
    assert len(scores[0]) == sum(len(row) - 1 for row in rows)
    found = perplexity.compare(*scores)
    assert abs(found.other_perplexity / found.perplexity - 1) < 0.01
    assert 0 < found.largest_difference < 5


def test_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [example] = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    commands: list[Any] = [shlex.split(line) for line in example.splitlines()]
    assert [command[:2] for command in commands] == [["strandline", "quantize"], ["strandline", "eval"]]
    for command in commands:
        assert main(command[1:]) == 0
    out = capsys.readouterr()
    assert "57 of 123 tensors converted" in out.out
    assert "Converting: 100%" in out.err


def test_quantize_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(tmp_path / "none"), "--output", str(tmp_path / "out")]) == 2
    assert "is neither 'demo', nor a directory" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["quantize", "demo", "--output", str(tmp_path)]) == 2
    assert "is not empty; name a new directory" in capsys.readouterr().err
