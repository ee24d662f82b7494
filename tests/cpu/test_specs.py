"""Sizes of blocks, slots and logs follow from the tensors that layers declare."""

from dataclasses import replace
from pathlib import Path

import pytest

import strandline
from strandline.bench.known_models import GEOMETRIES
from strandline.ids import BLOCK_TOKENS, PATH
from strandline.models.geometry import read_model_size
from strandline.specs import (
    ALIGN_BYTES,
    SNAPSHOT_DTYPES,
    LayerSpec,
    LogSpec,
    ModelSpec,
    SnapshotSize,
    TensorSpec,
    WindowSize,
    kv_spec,
)

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
DEMO_FOLDER = Path(strandline.__file__).parent / "demo"

STATE = TensorSpec("state", (3, 5), "float32", is_recurrent=True)
WINDOW = TensorSpec("window", (3, 7), "bfloat16")
LOG = LogSpec(4, (TensorSpec("key", (4, 3), "float32"), TensorSpec("value", (4, 5), "bfloat16")))


def model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(layers, hidden_size=16, hidden_dtype="bfloat16")


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (CONFIGS / "qwen3.5-35b-a3b", (1310720, 65536000, 64393216, 64389120, 5928960)),
        (CONFIGS / "qwen3.5-4b", (2097152, 52428800, 51516416, 51511296, 4743168)),
        (CONFIGS / "tiny-qwen3.5", (131072, 3276800, 3219968, 3219456, 296448)),
        (DEMO_FOLDER, (65536, 851968, 823808, 823296, 148992)),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_sizes_of_published_models_stay_what_they_were(config: Path, sizes: tuple[int, ...]) -> None:
    spec = read_model_size(config).spec
    assert (spec.block_bytes, spec.slab_bytes, spec.raw_slot_bytes, spec.hidden_offset, spec.log_bytes) == sizes
    assert spec.log_tokens == 8


def test_sizes_of_named_geometries_stay_what_they_were() -> None:
    assert {name: (spec.block_bytes, spec.slab_bytes) for name, spec in GEOMETRIES.items()} == {
        "Qwen3.5-35B-A3B": (1310720, 65536000),
        "Qwen3.5-9B": (2097152, 52428800),
        "Qwen3.5-4B": (2097152, 52428800),
    }


def test_every_tensor_of_a_block_or_slot_is_aligned() -> None:
    layer = LayerSpec(
        streams=(TensorSpec("latent", (5,), "bfloat16"), TensorSpec("index", (1,), "int8")), states=(STATE, WINDOW)
    )
    spec = model(layer, layer)
    assert spec.raw_block_bytes == 2 * (3 * ALIGN_BYTES + ALIGN_BYTES)
    assert spec.hidden_offset == 2 * (ALIGN_BYTES + ALIGN_BYTES)
    assert spec.raw_slot_bytes == spec.hidden_offset + ALIGN_BYTES
    assert BLOCK_TOKENS * 5 * 2 <= 3 * ALIGN_BYTES


def test_layers_without_memory_add_nothing() -> None:
    mixers = (kv_spec(2, 8, "bfloat16"), LayerSpec(states=(STATE,), log=LOG))
    plain, mixed = model(*mixers), model(LayerSpec(), mixers[0], LayerSpec(), LayerSpec(), mixers[1])
    for size in ("block_bytes", "slab_bytes", "raw_slot_bytes", "hidden_offset", "log_bytes", "log_tokens"):
        assert getattr(plain, size) == getattr(mixed, size)


def test_model_without_streams_or_states_still_has_blocks_and_slots() -> None:
    spec = model(LayerSpec())
    assert (spec.block_bytes, spec.slab_bytes, spec.log_tokens, spec.log_bytes) == (ALIGN_BYTES, ALIGN_BYTES, 0, 0)


def test_log_bytes_count_all_tensors_of_all_logs() -> None:
    spec = model(LayerSpec(states=(STATE,), log=LOG), LayerSpec(states=(STATE,), log=LOG))
    assert spec.log_bytes == 2 * (4 * 3 * 4 + 4 * 5 * 2)


def test_log_tokens_is_the_least_of_all_recurrent_layers() -> None:
    logged = LayerSpec(states=(STATE, WINDOW), log=LOG)
    shorter = LayerSpec(states=(STATE,), log=LogSpec(2, ()))
    assert model(logged, LayerSpec(states=(WINDOW,))).log_tokens == 4
    assert model(logged, shorter).log_tokens == 2
    assert model(logged, LayerSpec(states=(STATE,))).log_tokens == 0


def test_states_at_rest_take_fewer_bytes() -> None:
    flat = TensorSpec("h", (9,), "float32", is_recurrent=True)
    half = TensorSpec("state", (3, 5), "bfloat16", is_recurrent=True)
    assert STATE.stored("float32") == (STATE,)
    assert STATE.stored("bfloat16") == (TensorSpec("state", (3, 5), "bfloat16"),)
    assert STATE.stored("int8") == (TensorSpec("state", (3, 5), "int8"), TensorSpec("state_scale", (3,), "float32"))
    assert flat.stored("int8") == flat.stored("bfloat16") == (TensorSpec("h", (9,), "bfloat16"),)
    for kept in (WINDOW, half):
        assert {kept.stored(dtype) for dtype in SNAPSHOT_DTYPES} == {(kept,)}


def test_snapshots_at_rest_take_fewer_blocks() -> None:
    spec = read_model_size(CONFIGS / "qwen3.5-35b-a3b").spec
    assert spec.stored("float32").raw_slot_bytes == spec.raw_slot_bytes
    assert [spec.stored(dtype).block_bytes for dtype in SNAPSHOT_DTYPES] == [spec.block_bytes] * 3
    assert [spec.stored_snapshots(dtype).max_blocks for dtype in SNAPSHOT_DTYPES] == [spec.blocks_per_slab, 26, 14]
    assert model(LayerSpec(streams=(WINDOW,))).stored_snapshots("int8").max_blocks == 0


def test_stored_snapshots_take_the_window_at_their_position() -> None:
    size = SnapshotSize(slot_bytes=1000, block_bytes=100, windows=(WindowSize(130, 60), WindowSize(64, 7)))
    assert [size.bytes_at(position) for position in (1, 64, 65, 129, 194, 200)] == [
        1000 + 60 * long + 7 * short for long, short in ((1, 1), (1, 1), (2, 2), (3, 2), (3, 2), (3, 2))
    ]
    assert [size.blocks_at(position) for position in (1, 65, 129)] == [11, 12, 12]
    assert size.sizes_bytes == tuple(sorted({size.bytes_at(position) for position in range(1, 1000)}))
    assert size.max_blocks == max(map(size.blocks_at, range(1, 1000))) == 12
    assert SnapshotSize(0, 100).sizes_bytes == ()


def test_blocks_of_windows_hold_the_layers_of_one_size() -> None:
    narrow, wide = (replace(kv_spec(1, 4, "bfloat16"), window_tokens=size) for size in (64, 128))
    states = LayerSpec(states=(STATE,))

    def windowed(*layers: LayerSpec) -> ModelSpec:
        return replace(model(*layers), has_window_blocks=True)

    block_bytes = model(narrow).raw_block_bytes
    assert windowed(wide, narrow, states, wide).window_sizes == ((64, block_bytes), (128, 2 * block_bytes))
    assert [size.num_tokens for size in windowed(narrow, wide).window_sizes] == [65, 129], "a token is computed again"
    assert model(narrow, states).window_sizes == ()
    spec = windowed(wide, narrow, states, kv_spec(1, 4, "bfloat16"))
    assert [spec.lifetime_of(layer) for layer in spec.layers] == [2, 1, PATH, PATH]


def test_window_blocks_of_each_size_divide_a_slab() -> None:
    layers = [replace(kv_spec(1, width, "bfloat16"), window_tokens=size) for width, size in ((4, 64), (12, 128))]
    spec = replace(model(*layers, kv_spec(1, 20, "bfloat16")), has_window_blocks=True)
    for size, stride_bytes, count in zip(
        spec.window_sizes, spec.window_strides_bytes, spec.window_blocks_per_slab, strict=True
    ):
        assert stride_bytes * count == spec.slab_bytes
        assert stride_bytes >= size.block_bytes
        assert stride_bytes % ALIGN_BYTES == 0
    assert spec.num_null_blocks * spec.block_bytes >= max(spec.window_strides_bytes)
