"""The vision tower of Qwen3.5 and its successors: pictures to embeddings of their tokens.

Blocks of attention and a feed-forward part work on patches; every patch attends to all of its own picture. At the end,
the patches of a token are joined and projected. All ranks hold the whole tower. Its weights keep the dtype of
activations, whatever the format of the text part's.

Source: ``transformers`` (``qwen3_5``); Wang et al., "Qwen2-VL", 2024, section 2.1.

Shape suffixes: Y rows and X columns of pixels, C channels, P patches of all pictures, I values of a patch, W width, O
outputs, H heads, J heads of queries, keys and values, D head dim, K entries of the table of positions, L patches of
one picture, F frequencies, N tokens, E hidden size of the text part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.config_fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, Fields
from strandline.kernels.rowwise.rotary import apply_rotary
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.models.vision.positions import Grid, frequencies_2d, patch_coordinates, rotary_2d, table_entries
from strandline.picture_config import NUM_CHANNELS, PictureConfig

VISUAL: Final = "model.visual."
"""Prefix of published tensors."""

EPS: Final = 1e-6
MAX_TABLE_SIDE: Final = 1024
MAX_FRAMES: Final = 16

RotaryTable = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """Sizes of a tower."""

    num_blocks: int
    width: int
    num_heads: int
    mlp_width: int
    num_outputs: int
    table_side: int
    """Rows and columns of the table of learned position embeddings."""
    num_frames: int
    """Frames of video that a patch spans; those of a picture are equal."""

    @classmethod
    def read(cls, fields: Fields, hidden_size: int) -> "TowerConfig":
        """Read the fields about pictures; raises as :class:`strandline.config_fields.Fields`.

        Args:
            hidden_size: hidden size of the text part.
        """
        fields.choice("hidden_act", ["gelu_pytorch_tanh"])
        if fields.value("deepstack_visual_indexes"):
            fields.reject("deepstack_visual_indexes", "empty")
        if fields.size("in_channels") != NUM_CHANNELS:
            fields.reject("in_channels", f"{NUM_CHANNELS}")
        width, num_heads = fields.size("hidden_size"), fields.size("num_heads", at_most=MAX_HEADS)
        if width % num_heads or width // num_heads % 4 or width // num_heads > MAX_HEAD_DIM:
            fields.reject(
                "num_heads", f"such that heads of {width:,} channels have a multiple of 4, up to {MAX_HEAD_DIM}"
            )
        if fields.size("out_hidden_size") != hidden_size:
            fields.reject("out_hidden_size", f"the text part's hidden_size, {hidden_size:,}")
        num_entries = fields.size("num_position_embeddings", at_most=MAX_TABLE_SIDE**2)
        side = int(num_entries**0.5)
        if side * side != num_entries:
            fields.reject("num_position_embeddings", "a square number")
        return cls(
            num_blocks=fields.size("depth", at_most=MAX_LAYERS),
            width=width,
            num_heads=num_heads,
            mlp_width=fields.size("intermediate_size"),
            num_outputs=hidden_size,
            table_side=side,
            num_frames=fields.size("temporal_patch_size", at_most=MAX_FRAMES),
        )


class Affine(nn.Module):
    """A matrix and a bias."""

    def __init__(self, num_outputs: int, num_inputs: int, site: Site) -> None:
        super().__init__()
        self.weight_OI, self.bias_O = site.parameter(num_outputs, num_inputs), site.parameter(num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_OI, self.bias_O)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield f"{prefix}.weight", whole(self.weight_OI)
        yield f"{prefix}.bias", whole(self.bias_O)


class LayerNorm(nn.Module):
    """A norm of each row, with mean and bias."""

    def __init__(self, width: int, site: Site) -> None:
        super().__init__()
        self.gain_W, self.bias_W = site.gain(width), site.parameter(width)

    def forward(self, x_PW: Tensor) -> Tensor:
        return F.layer_norm(x_PW, self.gain_W.shape, self.gain_W, self.bias_W, EPS)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield f"{prefix}.weight", whole(self.gain_W)
        yield f"{prefix}.bias", whole(self.bias_W)


class Block(nn.Module):
    """Attention within each picture, and a feed-forward part."""

    def __init__(self, config: TowerConfig, site: Site) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.norm1, self.norm2 = LayerNorm(width, site), LayerNorm(width, site)
        self.qkv, self.proj = Affine(3 * width, width, site), Affine(width, width, site)
        self.fc1, self.fc2 = Affine(config.mlp_width, width, site), Affine(width, config.mlp_width, site)

    def forward(self, hidden_PW: Tensor, rotary: RotaryTable, lengths: Sequence[int]) -> Tensor:
        """Return the hidden states after the block.

        Args:
            rotary: rotary table of every patch.
            lengths: patches of each picture.
        """
        attended_PW = self._attend(self.norm1(hidden_PW), rotary, lengths)
        hidden_PW = hidden_PW + attended_PW
        fed_PW: Tensor = self.fc2(F.gelu(self.fc1(self.norm2(hidden_PW)), approximate="tanh"))
        return hidden_PW + fed_PW

    def _attend(self, x_PW: Tensor, rotary: RotaryTable, lengths: Sequence[int]) -> Tensor:
        heads_PJD = self.qkv(x_PW).unflatten(-1, (3 * self.num_heads, -1))
        apply_rotary(heads_PJD[:, : 2 * self.num_heads], rotary)
        attended_LHD = []
        for heads_LJD in heads_PJD.split(list(lengths)):
            q_1HLD, k_1HLD, v_1HLD = heads_LJD.transpose(0, 1)[None].chunk(3, dim=1)
            attended_LHD.append(F.scaled_dot_product_attention(q_1HLD, k_1HLD, v_1HLD)[0].transpose(0, 1))
        attended_PW: Tensor = self.proj(torch.cat(attended_LHD).flatten(1))
        return attended_PW

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from self.norm1.targets(f"{prefix}norm1")
        yield from self.norm2.targets(f"{prefix}norm2")
        yield from self.qkv.targets(f"{prefix}attn.qkv")
        yield from self.proj.targets(f"{prefix}attn.proj")
        yield from self.fc1.targets(f"{prefix}mlp.linear_fc1")
        yield from self.fc2.targets(f"{prefix}mlp.linear_fc2")


class VisionTower(nn.Module):
    """Encodes pictures that are already resized.

    Args:
        pictures: how they are normalised, and which patches make a token.
    """

    def __init__(self, config: TowerConfig, pictures: PictureConfig, site: Site) -> None:
        super().__init__()
        self.config, self.pictures = config, pictures
        num_inputs, num_joined = NUM_CHANNELS * config.num_frames * pictures.patch_size**2, pictures.merge_size**2
        self.patch = Affine(config.width, num_inputs, site)
        self.table_KW = site.parameter(config.table_side**2, config.width)
        self.blocks = nn.ModuleList(Block(config, site) for _ in range(config.num_blocks))
        self.norm = LayerNorm(config.width, site)
        self.fc1 = Affine(num_joined * config.width, num_joined * config.width, site)
        self.fc2 = Affine(config.num_outputs, num_joined * config.width, site)
        mean_C1, std_C1 = (torch.tensor(values)[:, None] for values in (pictures.mean, pictures.std))
        self.register_buffer("mean_C1", mean_C1.to(site.device), persistent=False)
        self.register_buffer("std_C1", std_C1.to(site.device), persistent=False)
        inv_freq_F = frequencies_2d(config.width // config.num_heads)
        self.register_buffer("inv_freq_F", inv_freq_F.to(site.device), persistent=False)

    mean_C1: Tensor
    std_C1: Tensor
    inv_freq_F: Tensor

    @torch.no_grad()
    def forward(self, pictures: Sequence[Tensor]) -> Tensor:
        """Return the embeddings of the pictures' tokens, one picture after another, ``[N, E]``.

        Args:
            pictures: uint8 ``[Y, X, C]`` each, on the tower's device; Y and X are multiples of a token's side.
        """
        size, merge = self.pictures.patch_size, self.pictures.merge_size
        grids = [Grid(pixels_YXC.shape[0] // size, pixels_YXC.shape[1] // size) for pixels_YXC in pictures]
        coordinates = [patch_coordinates(grid, merge, self.table_KW.device) for grid in grids]
        values_PI = torch.cat([self._patches(*picture) for picture in zip(pictures, grids, strict=True)])
        hidden_PW = self.patch(values_PI)
        embedded = [self._embedded_positions(*each, grid) for each, grid in zip(coordinates, grids, strict=True)]
        hidden_PW = hidden_PW + torch.cat(embedded).to(hidden_PW.dtype)
        row_P, column_P = (torch.cat(of_picture) for of_picture in zip(*coordinates, strict=True))
        rotary = rotary_2d(row_P, column_P, self.inv_freq_F)
        lengths = [grid.num_patches for grid in grids]
        for block in self.blocks:
            hidden_PW = block(hidden_PW, rotary, lengths)
        joined_NO = self.norm(hidden_PW).view(-1, self.fc1.weight_OI.shape[1])
        embedded_NE: Tensor = self.fc2(F.gelu(self.fc1(joined_NO)))
        return embedded_NE

    def _patches(self, pixels_YXC: Tensor, grid: Grid) -> Tensor:
        """Return the normalised values of every patch: channel by channel, frame by frame, row by row."""
        size, merge = self.pictures.patch_size, self.pictures.merge_size
        sides = (grid.rows // merge, merge, size, grid.columns // merge, merge, size, NUM_CHANNELS)
        values = pixels_YXC.reshape(sides).permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, NUM_CHANNELS, size * size)
        values = (values.float() / 255 - self.mean_C1) / self.std_C1
        values = values.to(self.patch.weight_OI.dtype)
        # As the model was trained: summing weights of equal frames first would round differently.
        return values[:, :, None].expand(-1, -1, self.config.num_frames, -1).flatten(1)

    def _embedded_positions(self, row_P: Tensor, column_P: Tensor, grid: Grid) -> Tensor:
        """Return the position embeddings of patches, float32."""
        entries = table_entries(row_P, column_P, grid, self.config.table_side)
        # One corner after the other: of the largest pictures, all together would take a gigabyte.
        embedded_PW = torch.zeros(grid.num_patches, self.config.width, device=self.table_KW.device)
        for index_P, weight_P1 in zip(entries.index_PK.T, entries.weight_PK.T[..., None], strict=True):
            embedded_PW += self.table_KW[index_P] * weight_P1
        return embedded_PW

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        size = self.pictures.patch_size
        shape = (self.config.width, NUM_CHANNELS, self.config.num_frames, size, size)
        yield f"{prefix}patch_embed.proj.weight", whole(self.patch.weight_OI.view(shape))
        yield f"{prefix}patch_embed.proj.bias", whole(self.patch.bias_O)
        yield f"{prefix}pos_embed.weight", whole(self.table_KW)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            yield from block.targets(f"{prefix}blocks.{index}.")
        yield from self.norm.targets(f"{prefix}merger.norm")
        yield from self.fc1.targets(f"{prefix}merger.linear_fc1")
        yield from self.fc2.targets(f"{prefix}merger.linear_fc2")


def tower_builder(vision: Fields | None, hidden_size: int, site: Site) -> Callable[[PictureConfig], VisionTower] | None:
    """Return what builds the tower of a model, with unfilled parameters; None: it has none.

    Args:
        vision: the fields about pictures.
        hidden_size: hidden size of the text part.
    """
    if vision is None:
        return None
    return lambda pictures: VisionTower(TowerConfig.read(vision, hidden_size), pictures, site)
