"""The experts that a model's tokens are routed to, stored in the tokens' blocks.

They are a stream like keys and values, so they come along with a prefix that is hit, copied, moved or loaded.

Shape suffixes: T tokens of the step, K experts of a token, B blocks, P tokens of a block, C bytes of a token.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.errors import ConfigError
from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.feed_forward.skipping_moe import SkippingMoe
from strandline.specs import LayerSpec, RoutingShape, TensorSpec

STREAM = "routed_experts"


class RoutingRecord:
    """Records the choices of a model's routers.

    Args:
        layers: layers of the model, without those that draft.

    Raises:
        ConfigError: none of them has experts.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._chosen = dict[int, Tensor]()
        """Experts of the step's tokens, by layer."""
        configs = []
        for index, layer in enumerate(layers):
            for experts in (module for module in layer.modules() if isinstance(module, Experts)):
                experts.record = partial(self._chosen.__setitem__, index)
                configs.append(experts.config)
        if not configs:
            raise ConfigError("--enable-return-routed-experts: this model has no experts")
        numbers = max(config.num_experts for config in configs)
        # The choice of no expert is a number, too.
        numbers += any(isinstance(module, SkippingMoe) for layer in layers for module in layer.modules())
        self.shape = RoutingShape(len(layers), max(config.routing.top_k for config in configs), numbers)

    @property
    def spec(self) -> LayerSpec:
        """Spec of what is stored."""
        return LayerSpec(streams=(TensorSpec(STREAM, (self.shape.num_bytes,), "uint8"),))

    def bind(self, memory: LayerMemory) -> Tensor:
        """Return the memory as ``store`` takes it."""
        return memory.streams[STREAM]

    def store(self, batch: StepBatch, memory_BPC: Tensor) -> None:
        """Store the experts of the tokens that the layers have just computed; dense layers have zeros."""
        dtype = torch.uint8 if self.shape.item_bytes == 1 else torch.int16
        num_rows, top_k = len(batch.token_ids_T), self.shape.top_k
        nothing_TK = torch.zeros(num_rows, top_k, dtype=dtype, device=memory_BPC.device)
        rows = [self._chosen.get(layer, nothing_TK).to(dtype) for layer in range(self.shape.num_layers)]
        padded = [F.pad(row_TK, (0, top_k - row_TK.shape[1])) for row_TK in rows]
        row_TC = torch.stack(padded, dim=1).flatten(1).view(torch.uint8)
        self._chosen.clear()
        # Rows that shared blocks have already go to the null block, which nothing reads.
        attention = batch.attention
        memory_BPC[attention.write_blocks_T, attention.write_offsets_T] = row_TC
