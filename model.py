"""The twin-population Mixture-of-Experts transformer, and its sizing report.

    python model.py config/cloud_h100.py          parameters, FLOPs, memory, tokens/s limits, hours, passes

Decoder-only, pre-norm. Every feed-forward is a twin MoE: two populations of routed experts, Sheldon (0) and
Spock (1), and shared experts that every token uses. A token takes K/2 experts of each population, always.

Letters in shapes: B batch, T time, N = B*T tokens, P = 2 populations, E routed experts per population, K = top_k
over both, k = K/2 per population, S = N*K rows after dispatch, H query heads, G key/value heads, D head_dim,
F expert_d_ff, V vocabulary, L layers. The model width is written out: d_model.
"""
import ctypes
import json
import math
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as recompute

import config as settings_rule
from config import UserError

# architecture: the plan's H100 model
vocab_size = 32768       # tokens
d_model = 512            # width of the residual stream
n_layers = 12
n_heads = 8              # query heads
n_kv_heads = 2           # key/value heads, shared by n_heads / n_kv_heads query heads each
head_dim = 64
n_routed = 32            # routed experts per population; 0 makes the dense model of the same code
n_shared = 2             # shared experts, used by every token
top_k = 4                # routed experts per token, half from each population
expert_d_ff = 128        # hidden width of one expert
seq_len = 2048           # tokens; the longest context
dropout = 0.1            # on the residual branches
tie_embeddings = False   # True: the LM head is the input embedding
checkpoint_moe = True    # recompute the experts in the backward pass instead of keeping their activations
# what the report reckons with
data_dir = "data/cipher"
batch_size = 16          # sequences per micro-step and GPU
grad_accum = 3           # micro-steps per optimizer step
max_tokens = 100_000_000
max_hours: float | None = None
require_bf16 = False     # True: a GPU with BF16; the report reckons with it

POPULATIONS = ("Sheldon", "Spock")
P = len(POPULATIONS)

if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
    # glibc hands freed blocks back to the system, which zeroes pages for the next step; kept, a step on two cores takes
    # 5 % less time, with 128 experts 12 %
    libc.mallopt(-4, 0)     # M_MMAP_MAX: no block with a mapping of its own
    libc.mallopt(-1, -1)    # M_TRIM_THRESHOLD: never give back


@dataclass(frozen=True)
class ModelConfig:
    """The architecture; fields as the settings above. Raises UserError with a line for each impossible value."""
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_routed: int
    n_shared: int
    top_k: int
    expert_d_ff: int
    seq_len: int
    dropout: float
    tie_embeddings: bool
    checkpoint_moe: bool

    def __post_init__(self):
        least = dict.fromkeys(("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "expert_d_ff", "seq_len"), 1)
        mistakes = [f"{name}={getattr(self, name)} must be {low} or more" for name, low in (least | dict(n_routed=0, n_shared=0)).items()
                    if getattr(self, name) < low]
        mistakes += [f"{name}={getattr(self, name):,} is beyond all hardware" for name in (*least, "n_routed", "n_shared") if getattr(self, name) > 1 << 20]
        if self.n_layers > 1000:
            mistakes.append(f"n_layers={self.n_layers:,} must be at most 1,000")
        if self.n_kv_heads > 0 and self.n_heads % self.n_kv_heads:
            mistakes.append(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")
        if self.head_dim % 2:
            mistakes.append(f"head_dim={self.head_dim} must be even (rotary pairs)")
        if self.n_routed > 0 and (self.top_k < 2 or self.top_k % 2):
            mistakes.append(f"top_k={self.top_k} must be even and at least 2 (half from each population)")
        if self.n_routed > 0 and self.top_k > P * self.n_routed:
            mistakes.append(f"top_k={self.top_k} must be at most {P * self.n_routed} (n_routed={self.n_routed} in each population)")
        if self.n_routed == 0 and self.n_shared == 0:
            mistakes.append("n_routed=0 and n_shared=0: a layer needs experts of one kind")
        if not 0 <= self.dropout < 1:
            mistakes.append(f"dropout={self.dropout} must be from 0 up to, not including, 1")
        if mistakes:
            raise UserError("\n".join(mistakes))


def architecture(settings: dict) -> ModelConfig:
    """Pick the architecture out of a script's or a checkpoint's effective settings."""
    return ModelConfig(**{field.name: settings[field.name] for field in fields(ModelConfig)})


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype matrix products run in: autocast's where it is on, else that of x. Our own kernels must ask."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


# ----------------------------------------------------------------------------------------------------------
# Norm, rotary positions, attention
# ----------------------------------------------------------------------------------------------------------

def inverse_rms(x):
    """1 / sqrt(mean(x^2) + 1e-6) over the last dimension, kept as 1."""
    return (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.size(-1) + 1e-6).rsqrt()


class RootMeanSquare(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + 1e-6) * gain over the last dimension (arXiv 1910.07467), in FP32.

    Written out because F.rms_norm on the CPU is a dozen passes forward and backward: 2.3 times as long on two cores.
    Compiled, either becomes one kernel.
    """

    @staticmethod
    def forward(ctx, x, gain):
        """x [..., d], gain [..., d] of x's last dimensions."""
        x = x.float()
        scale = inverse_rms(x)
        ctx.save_for_backward(x, gain, scale)
        return (x * scale).mul_(gain)

    @staticmethod
    def backward(ctx, grad):
        x, gain, scale = ctx.saved_tensors
        grad_gain = None
        if gain.dim() > 1:                          # LayerNorm's kernel takes one gain for all
            grad_gain = (grad * x).mul_(scale).reshape(-1, *gain.shape).sum(0)
            grad, gain = grad * gain, None
        # LayerNorm's backward of a mean that is zero; it takes the mean of the gradient away, which belongs here
        grad_x, grad_shared_gain, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, [x.size(-1)], torch.zeros_like(scale), scale, gain, None, [True, gain is not None, False])
        mean = grad.mean(-1, keepdim=True) if gain is None else (grad @ gain)[..., None] / x.size(-1)
        return grad_x.addcmul_(mean, scale), grad_shared_gain if grad_gain is None else grad_gain


def rms_norm(x, gain):
    """RootMeanSquare, in generation and evaluation without a Function's overhead."""
    if torch.is_grad_enabled():
        return RootMeanSquare.apply(x, gain)
    x = x.float()
    return x * inverse_rms(x) * gain


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return rms_norm(x, self.weight)


def rope_table(config: ModelConfig) -> torch.Tensor:
    """Cosines, and sines with their sign, of all positions, [2, seq_len, D]; the pairs are (i, i + D/2) (arXiv 2104.09864)."""
    frequency = 10_000.0 ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    angle = torch.outer(torch.arange(config.seq_len, dtype=torch.float32), frequency)
    return torch.stack((torch.cat((angle, angle), 1).cos(), torch.cat((-angle, angle), 1).sin()))


def rotate(x, rope):
    """Rotate [B, T, heads, D] by the positions of rope [2, T, D] or [2, B, T, D]."""
    cos, sin = rope.unsqueeze(-2)
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


class Attention(nn.Module):
    """Causal grouped-query attention; RMSNorm over D on queries and keys before the rotation (QK-Norm)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = (config.n_heads, config.n_kv_heads)
        self.qkv = nn.Linear(config.d_model, (config.n_heads + 2 * config.n_kv_heads) * config.head_dim, bias=False)
        self.q_norm, self.k_norm = RMSNorm(config.head_dim), RMSNorm(config.head_dim)
        self.out = nn.Linear(config.n_heads * config.head_dim, config.d_model, bias=False)

    def forward(self, x, rope, mask=None, cache=None):
        """x [B, T, d_model]; mask [(B, 1,) T, filled + T] of keys to see, None: causal;
        cache: this layer's (keys, values) [B, G, capacity, D] and the number of positions already filled."""
        (B, T, _), (H, G) = x.shape, self.heads
        qk, v = self.qkv(x).view(B, T, H + 2 * G, -1).split((H + G, G), 2)            # [B, T, H + G, D], [B, T, G, D]
        # queries and keys normed and rotated together: half the passes over them
        gain = torch.cat((self.q_norm.weight.expand(H, -1), self.k_norm.weight.expand(G, -1)))
        qk = rotate(rms_norm(qk, gain), rope).to(v.dtype)
        q, k = qk.transpose(1, 2).split((H, G), 1)                                    # [B, H, T, D], [B, G, T, D]
        v = v.transpose(1, 2)
        if cache is not None:
            keys, values, filled = cache
            keys[:, :, filled:filled + T], values[:, :, filled:filled + T] = k, v
            k, v = keys[:, :, :filled + T], values[:, :, :filled + T]
        # one query sees every key there is (is_causal would show it the first alone); several behind a cache need a mask
        assert mask is not None or T == 1 or k.size(2) == T, (T, k.size(2))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=T > 1 and mask is None, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


# ----------------------------------------------------------------------------------------------------------
# Router
# ----------------------------------------------------------------------------------------------------------

class Router(nn.Module):
    """Who works on a token and how much, in FP32 (DeepSeek-V3, arXiv 2412.19437, eq. 13-16; per population here).

        affinity = sigmoid(x @ W);  selected = top k of (affinity + expert_bias) in each population
        gate = affinity[selected] / sum of affinity over all K selected
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.k = config.top_k // P
        self.weight = nn.Parameter(torch.empty(P * config.n_routed, config.d_model))
        self.register_buffer("expert_bias", torch.zeros(P, config.n_routed))    # only decides who is chosen

    def _apply(self, fn, recurse=True):
        """Let .to() move the bias but never round it: steps of 0.001 vanish in BF16."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def forward(self, x, silence=None, renormalise=False):
        """x [N, d_model] -> logits [N, P, E], selected [N, P, k] (ids in 0 ... P*E-1), gate [N, P, k], load [P, E] int64.

        silence: a population whose gates become 0; renormalise: the others then sum to 1 again (for ablations).
        """
        with torch.autocast(x.device.type, enabled=False):      # BF16 ties would flip selections
            logits = F.linear(x.float(), self.weight.float()).view(len(x), P, -1)     # [N, P, E]
            affinity = logits.sigmoid()
            selected = (affinity.detach() + self.expert_bias).topk(self.k, -1, sorted=False).indices   # [N, P, k]
            gate = affinity.gather(2, selected)
            if silence is not None:
                gate = gate * (torch.arange(P, device=x.device) != silence)[:, None]
            total = affinity.gather(2, selected) if silence is not None and not renormalise else gate
            gate = gate / (total.sum((1, 2), keepdim=True) + 1e-20)
        E = logits.size(2)
        selected = selected + torch.arange(0, P * E, E, device=x.device)[:, None]
        # scatter_add of whole numbers: exact in any order, and no bincount, which would break the compiled graph
        flat = selected.flatten()
        load = torch.zeros(P * E, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
        return logits, selected, gate, load.view(P, E)


# ----------------------------------------------------------------------------------------------------------
# Experts
# ----------------------------------------------------------------------------------------------------------

class Dispatch(torch.autograd.Function):
    """Copy tokens to the rows of their experts. Backward gathers and sums; indexing's own would not be repeatable."""

    @staticmethod
    def forward(ctx, x, token, inverse):
        """x [N, d], token: the token of each row, inverse [S]: the row of each (token, choice) -> [rows, d]."""
        ctx.save_for_backward(inverse)
        ctx.n = len(x)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx, grad):
        inverse, = ctx.saved_tensors
        return grad.index_select(0, inverse).view(ctx.n, -1, grad.size(1)).sum(1), None, None


class Combine(torch.autograd.Function):
    """Add up each target's rows: the transpose of Dispatch."""

    @staticmethod
    def forward(ctx, rows, inverse, target, n):
        """rows [rows, d] sorted by expert, target: which of the n sums each row enters -> [n, d]."""
        ctx.save_for_backward(target)
        return rows.index_select(0, inverse).view(n, -1, rows.size(1)).sum(1)

    @staticmethod
    def backward(ctx, grad):
        target, = ctx.saved_tensors
        return grad.index_select(0, target), None, None, None


class BlockMM(torch.autograd.Function):
    """Each expert's rows of x times its weight: one batched product of `capacity` rows each, and a product for each
    expert that has more. Dropless, at any imbalance.

    Written out because autograd through weight[i] would allocate a full-size gradient for every expert.
    """

    @staticmethod
    def forward(ctx, x, weight, capacity, over):
        """x [P*E*capacity + sum(over), in], weight [P*E, out, in], over: rows beyond capacity, a list -> [rows, out]."""
        ctx.save_for_backward(x, weight)
        ctx.capacity, ctx.over = capacity, over
        y = x.new_empty(len(x), weight.size(1))
        BlockMM.products(x, weight.mT, y, capacity, over)
        return y

    @staticmethod
    def products(x, weight, y, capacity, over):
        """Write x's blocks times weight [P*E, in, out] into y."""
        start = len(weight) * capacity
        if capacity:
            torch.bmm(x[:start].view(len(weight), capacity, -1), weight, out=y[:start].view(len(weight), capacity, -1))
        for i, n in enumerate(over):
            if n:
                torch.mm(x[start:start + n], weight[i], out=y[start:start + n])
                start += n

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x, start = torch.empty_like(x), len(weight) * ctx.capacity
        BlockMM.products(grad, weight, grad_x, ctx.capacity, ctx.over)
        split = (len(weight), ctx.capacity, -1)
        grad_w = torch.bmm(grad[:start].view(split).mT, x[:start].view(split)) if start else torch.zeros_like(weight)
        for i, n in enumerate(ctx.over):
            if n:
                grad_w[i].addmm_(grad[start:start + n].t(), x[start:start + n])
                start += n
        return grad_x, grad_w, None, None


def choose_capacity(sizes: list[int], product_cost: int) -> int:
    """Rows per expert for the batched product that cost least in all: padding, or further products of their own.

    sizes: rows of each expert; product_cost: what starting one more product costs, in rows. 0 where there are few
    rows (generation): a batched product would read every expert's weights for the handful that are used.
    """
    rows = sum(sizes)
    if rows <= len(sizes):
        return 0
    best, cheapest, above = 0, rows + product_cost * sum(n > 0 for n in sizes), rows
    for i, n in enumerate(sorted(sizes)):
        more, above = len(sizes) - i - 1, above - n             # experts with more rows than n, and their rows
        cost = n * len(sizes) + above - n * more + product_cost * more
        if cost < cheapest:
            best, cheapest = n, cost
    return best


class SwiGLU(torch.autograd.Function):
    """h = silu(a) * b, times a gate per row. Keeps a, b and the gate for the backward pass; autograd would keep two products more."""

    @staticmethod
    def forward(ctx, ab, gate=None):
        """ab [S, 2 F] (a, then b), gate [S, 1] or None -> [S, F] of ab's dtype."""
        ctx.save_for_backward(ab, gate)
        return SwiGLU.product(ab, gate)

    @staticmethod
    def product(ab, gate):
        a, b = ab.chunk(2, -1)
        h = F.silu(a).mul_(b)
        return h if gate is None else h.mul_(gate)

    @staticmethod
    def backward(ctx, grad):
        ab, gate = ctx.saved_tensors
        a, b = ab.chunk(2, -1)
        silu, grad_gate = F.silu(a), None
        if gate is not None:
            grad_gate = (grad * silu).mul_(b).sum(-1, keepdim=True, dtype=gate.dtype)
            grad = grad * gate.to(grad.dtype)
        return torch.cat((torch.ops.aten.silu_backward(grad * b, a), grad * silu), -1), grad_gate


def swiglu(ab, gate=None):
    """SwiGLU, in generation and evaluation without a Function's overhead."""
    return (SwiGLU.apply if torch.is_grad_enabled() else SwiGLU.product)(ab, gate)


class Experts(nn.Module):
    """One bank of both populations' SwiGLU experts: E_i(x) = W2_i (silu(W1_i x) * W3_i x).

    Two branches give the same numbers; choose_branch picks one for the device, once. F.grouped_mm: one kernel over
    all experts, and the host reads nothing. Or BlockMM: the host reads the loads, once a layer (`plan`), and balances
    padding against the number of products by product_cost.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        n = P * config.n_routed
        self.w13 = nn.Parameter(torch.empty(n, 2 * config.expert_d_ff, config.d_model))   # W1 and W3 in one product
        self.w2 = nn.Parameter(torch.empty(n, config.d_model, config.expert_d_ff))
        self.product_cost = 256                     # rows; None: F.grouped_mm. On two CPU cores 256 gained 10 % where
                                                    # threads sleep between products, none where they spin

    def plan(self, load):
        """BlockMM's capacity and the rows beyond it per expert, or None for F.grouped_mm; load [P, E]."""
        if self.product_cost is None:
            return None
        sizes = load.flatten().tolist()             # the host waits here for the router
        capacity = choose_capacity(sizes, self.product_cost)
        return capacity, [max(0, n - capacity) for n in sizes]

    def forward(self, x, selected, gate, load, plan):
        """x [N, d_model] -> [N, P, d_model], each population's gated sum over its chosen experts."""
        N, K, k = len(x), selected[0].numel(), selected.size(2)
        dtype, device = compute_dtype(x), x.device
        if plan is not None and not plan[0] and not torch.is_grad_enabled():
            # generation: a handful of rows, sorted on the host, and plain products
            flat, sizes = selected.flatten().tolist(), [n for n in plan[1] if n]
            row = torch.tensor(sorted(range(N * K), key=flat.__getitem__), device=device)
            linear = lambda h, bank: torch.cat([F.linear(h, bank[i].to(dtype)) for h, i in zip(h.split(sizes), sorted(set(flat)))])
            h = swiglu(linear(x.to(dtype).index_select(0, row // K), self.w13), gate.view(-1, 1).index_select(0, row))
            y = linear(h, self.w2)
            return torch.empty_like(y).index_copy_(0, row, y).view(N, P, k, -1).sum(2)
        flat, load, gate = selected.flatten(), load.flatten(), gate.flatten()   # [S] token by token, [P*E], [S]
        row = flat.argsort(stable=True)                                         # [S] sorted by expert
        place, ends = torch.arange(len(row), device=device), load.cumsum(0)     # where each sorted row will lie
        if plan is None:
            gate = gate.index_select(0, row)
            inverse = torch.empty_like(row).scatter_(0, row, place)             # [S] the place of each (token, choice)
            linear = lambda h, w: F.grouped_mm(h, w.mT, offs=ends.to(torch.int32))
        else:
            capacity, over = plan
            beyond = (load - capacity).clamp(min=0)
            expert = flat.index_select(0, row)
            position = place - (ends - load).index_select(0, expert)            # within the expert
            first_over = len(load) * capacity + (beyond.cumsum(0) - beyond - capacity).index_select(0, expert)
            place = position + torch.where(position < capacity, capacity * expert, first_over)
            inverse = torch.empty_like(row).scatter_(0, row, place)
            row = torch.full((len(load) * capacity + sum(over),), -1, device=device).scatter_(0, place, row)
            padding, row = row < 0, row.clamp(min=0)
            gate = gate.index_select(0, row).masked_fill(padding, 0)            # and so a padding row's gradients are 0
            linear = lambda h, w: BlockMM.apply(h, w, capacity, over)
        ab = linear(Dispatch.apply(x.to(dtype), row // K, inverse), self.w13.to(dtype))      # [S, 2 F]
        # the gate is applied here, at width F, not behind W2 at width d_model: the same by linearity
        h = swiglu(ab, gate[:, None])                                           # [S, F]
        return Combine.apply(linear(h, self.w2.to(dtype)), inverse, row // k, N * P).view(N, P, -1)


def choose_branch(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Set, once at start, how expert products run, and return it in words.

    F.grouped_mm is one kernel only for BF16 on compute capability 9.0 and up, with row strides of 16 bytes.
    Elsewhere on a GPU it is itself a loop: for 64 experts 64 launches and a host read for each of the six products of
    a layer's forward and backward. BlockMM takes one launch each, a few more where an expert is overloaded, and one read.
    """
    banks = [module for module in model.modules() if isinstance(module, Experts)]
    aligned = all(size % 8 == 0 for bank in banks for size in bank.w2.shape[1:])
    grouped = device.type == "cuda" and dtype == torch.bfloat16 and aligned and torch.cuda.get_device_capability(device) >= (9, 0)
    for bank in banks:
        # a launch of about 5 us is worth thousands of rows on a GPU (an estimate, not measured on one)
        bank.product_cost = None if grouped else 4096 if device.type == "cuda" else 256
    return "experts by F.grouped_mm" if grouped else "experts by batched products"


# ----------------------------------------------------------------------------------------------------------
# The twin MoE layer and the block
# ----------------------------------------------------------------------------------------------------------

class TwinSum(torch.autograd.Function):
    """The sum of both populations' outputs, and how alike they are: the mean squared cosine (ortho loss) and the mean
    absolute cosine (overlap). eps keeps the gradient of small outputs small and that of zero outputs zero.

    Written out: a few passes over the outputs instead of two dozen.
    """

    @staticmethod
    def forward(ctx, y):
        """y [N, P, d_model] -> sum [N, d_model], ortho, overlap, all FP32."""
        y = y.float()
        square = torch.linalg.vector_norm(y, dim=-1).square() + 1e-4 * y.size(-1)                  # [N, P]
        dot = (y[:, 0] * y[:, 1]).sum(-1, keepdim=True)                                             # [N, 1]
        cosine2 = dot.square() / square.prod(-1, keepdim=True)
        ctx.save_for_backward(y, square, dot)
        overlap = cosine2.sqrt().mean()
        ctx.mark_non_differentiable(overlap)
        return y.sum(1), cosine2.mean(), overlap

    @staticmethod
    def backward(ctx, grad, grad_ortho, _):
        y, square, dot = ctx.saved_tensors
        scale = 2 * grad_ortho / len(y) * dot / square.prod(-1, keepdim=True)                       # [N, 1]
        # d cosine^2 / dy_p = 2 dot / (square_0 square_1) (y_other - dot / square_p y_p)
        grad_y = torch.addcmul(grad[:, None], y.flip(1), scale[:, None])
        return grad_y.addcmul_(y, (scale * dot / square)[:, :, None], value=-1)


class TwinMoE(nn.Module):
    """y = shared(x) + y_Sheldon + y_Spock,   y_p = sum over the chosen experts i of population p of g_i * E_i(x)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.n_shared * config.expert_d_ff            # the shared experts are one dense SwiGLU
        self.shared_w13 = nn.Linear(config.d_model, 2 * width, bias=False) if width else None
        self.shared_w2 = nn.Linear(width, config.d_model, bias=False) if width else None
        self.router = Router(config) if config.n_routed else None
        self.experts = Experts(config) if config.n_routed else None
        self.checkpoint = config.checkpoint_moe

    def feed_forward(self, x, measure, *routed):
        """Everything behind the router, [N, d_model] -> y, ortho loss, overlap: the part that may be recomputed."""
        y, ortho, overlap = 0, x.new_zeros(()), x.new_zeros(())
        if self.shared_w13 is not None:
            y = self.shared_w2(swiglu(self.shared_w13(x)))
        if self.router is not None:
            twins = self.experts(x, *routed)                    # [N, P, d_model]
            total, ortho, overlap = TwinSum.apply(twins) if measure else (twins.sum(1), ortho, overlap)
            y = y + total
        return y, ortho, overlap

    def forward(self, x, measure=True, **ablation):
        """x [N, d_model] -> y [N, d_model], z-loss, ortho loss, overlap (zeros unless measure), load [P, E]."""
        routed, load, z = (), torch.zeros(P, 0, dtype=torch.int64, device=x.device), x.new_zeros(())
        if self.router is not None:
            logits, selected, gate, load = self.router(x, **ablation)
            z = logits.logsumexp(-1).square().mean() if measure else z              # z-loss: ST-MoE, arXiv 2202.08906, eq. 5
            routed = (selected, gate, load, self.experts.plan(load))
        if self.checkpoint and self.training and torch.is_grad_enabled():
            # The router stands outside: recomputed, it could choose others and would count the load twice.
            y, ortho, overlap = recompute(self.feed_forward, x, measure, *routed, use_reentrant=False, preserve_rng_state=False)
        else:
            y, ortho, overlap = self.feed_forward(x, measure, *routed)
        return y, z, ortho, overlap, load


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.d_model), RMSNorm(config.d_model)
        self.attention, self.moe = Attention(config), TwinMoE(config)
        self.dropout = config.dropout

    def forward(self, x, rope, mask=None, cache=None, measure=True, **ablation):
        x = x + F.dropout(self.attention(self.norm1(x), rope, mask, cache), self.dropout, self.training)
        y, *losses, load = self.moe(self.norm2(x).flatten(0, 1), measure, **ablation)
        return x + F.dropout(y.view_as(x), self.dropout, self.training), losses, load


# ----------------------------------------------------------------------------------------------------------
# Head and loss
# ----------------------------------------------------------------------------------------------------------

LOGITS_AT_ONCE = {True: 1 << 27, False: 1 << 22}    # on a GPU, else: 512 and 16 MB in FP32


class HeadLoss(torch.autograd.Function):
    """LM head and mean cross-entropy, a chunk of tokens at a time, with the gradients made on the way forward.

    All logits of 32,768 tokens and as many words would be 4.3 GB in FP32, two or three times over. Here one chunk
    exists at a time and its softmax is turned into gradients at once, so nothing is computed twice.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, chunk):
        """x [N, d_model], weight [V, d_model], targets [N] int64 -> mean cross-entropy in nats, FP32."""
        w, x = weight.to(dtype), x.to(dtype)
        loss = torch.zeros((), device=x.device)
        grad_x, grad_w = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        for xc, tc, gc in zip(x.split(chunk), targets[:, None].split(chunk), grad_x.split(chunk)):
            log_p = F.log_softmax(xc @ w.t(), -1, dtype=torch.float32)          # [chunk, V]
            loss -= log_p.gather(1, tc).sum()
            p = log_p.exp_().scatter_add_(1, tc, -torch.ones_like(tc, dtype=torch.float32)).to(dtype)   # d loss / d logits
            torch.mm(p, w, out=gc)
            if dtype == torch.float32:
                grad_w.addmm_(p.t(), xc)
            else:
                grad_w += p.t() @ xc                # chunks add up in FP32
        ctx.save_for_backward(grad_x, grad_w)
        return loss / len(x)

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        scale = grad / len(grad_x)
        return grad_x.float() * scale, grad_w * scale, None, None, None


def head_loss(x, weight, targets):
    """Mean cross-entropy in nats of targets [N] under softmax(x [N, d_model] @ weight.T), without holding all logits."""
    dtype = compute_dtype(x)
    chunk = max(1, LOGITS_AT_ONCE[x.is_cuda] // len(weight))                    # tokens
    if torch.is_grad_enabled():
        return HeadLoss.apply(x, weight, targets, dtype, chunk)
    w = weight.to(dtype)
    return sum(F.cross_entropy(F.linear(xc.to(dtype), w).float(), tc, reduction="sum")
               for xc, tc in zip(x.split(chunk), targets.split(chunk))) / len(x)


# ----------------------------------------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------------------------------------

class KVCache:
    """Keys and values of every layer for a batch of rows of equal length, [L, B, G, capacity, D] each."""

    def __init__(self, config: ModelConfig, batch: int, capacity: int, device, dtype):
        shape = (config.n_layers, batch, config.n_kv_heads, capacity, config.head_dim)
        self.keys, self.values = torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
        self.filled = 0                             # positions


class Cipher(nn.Module):
    """Embedding, L blocks, norm, LM head. forward returns everything the caller needs; nothing is left behind."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model)
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.register_buffer("rope", rope_table(config), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """| tensor                                      | std                     |
        |---------------------------------------------|-------------------------|
        | projections back into the residual stream:  | 0.02 / sqrt(2 n_layers) |
        |   attention.out, experts.w2, shared_w2      |                         |
        | every other matrix                          | 0.02                    |
        | norm gains                                  | 1, constant             |

        Each tensor is drawn afresh, so the two populations start from different weights.
        """
        for name, tensor in self.named_parameters():
            if tensor.dim() > 1:
                back = name.endswith(("attention.out.weight", "experts.w2", "shared_w2.weight"))
                tensor.normal_(std=0.02 / math.sqrt(2 * self.config.n_layers) if back else 0.02)

    def forward(self, idx, targets=None, all_logits=False, cache=None, padding=None, **ablation):
        """idx [B, T] int64. With targets [B, T]: dict of ce (nats), z, ortho, overlap (means over layers), load [L, P, E].

        Without: dict of logits, FP32 [B, 1, V] of the last position or [B, T, V] with all_logits, and load.
        cache: a KVCache whose positions go before idx. padding [B]: how many of a row's first positions are not there.
        ablation: silence, renormalise, as in Router.forward.
        """
        T, start = idx.size(1), cache.filled if cache else 0
        if start + T > self.config.seq_len:
            raise UserError(f"{start + T} tokens are more than the context of {self.config.seq_len} (seq_len)")
        rope, mask = self.rope[:, start:start + T], None
        if padding is not None or start and T > 1:
            query, key = torch.arange(start, start + T, device=idx.device), torch.arange(start + T, device=idx.device)
            mask = key <= query[:, None]                        # [T, start + T]
            if padding is not None:
                rope = self.rope[:, (query - padding[:, None]).clamp(min=0)]                        # [2, B, T, D]
                there = (key >= padding[:, None, None]) | (key == query[:, None])                   # padding sees itself: no NaN
                mask = (mask & there)[:, None]                  # [B, 1, T, start + T]
        x, losses, loads = self.embedding(idx), [], []          # [B, T, d_model], FP32 throughout
        for layer, block in enumerate(self.blocks):
            layer_cache = (cache.keys[layer], cache.values[layer], start) if cache else None
            x, layer_losses, load = block(x, rope, mask, layer_cache, targets is not None, **ablation)
            losses.append(layer_losses)
            loads.append(load)
        if cache:
            cache.filled += T
        x, load = self.norm(x), torch.stack(loads)
        weight = self.embedding.weight if self.head is None else self.head.weight
        if targets is None:
            return dict(logits=F.linear(x if all_logits else x[:, -1:], weight).float(), load=load)
        z, ortho, overlap = (torch.stack(layers).mean() for layers in zip(*losses))
        return dict(ce=head_loss(x.flatten(0, 1), weight, targets.flatten()), z=z, ortho=ortho, overlap=overlap.detach(), load=load)

    @torch.no_grad()
    def update_bias(self, load, rate):
        """Move each expert's bias by rate towards an even load (arXiv 2408.15664, algorithm 1).

        load [L, P, E]: assignments over one whole optimizer step, all micro-steps and ranks. Re-centred to mean
        zero per population, which changes no selection.
        """
        for block, counts in zip(self.blocks, load.float()):
            if block.moe.router is not None:
                bias = block.moe.router.expert_bias
                bias += rate * (counts.mean(-1, keepdim=True) - counts).sign()
                bias -= bias.mean(-1, keepdim=True)

    @torch.inference_mode()
    def stream(self, prompts, max_new_tokens, temperature=1.0, top_k=None, top_p=None, seed=None, stop_id=None,
               repetition_penalty=1.0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (the next ids [B] behind the prompts, the logits [B, V] they were drawn from), one position at a time, with a KV cache.

        prompts: [B, T] int64, or a list of B lists of ids of any lengths from 1. Ends after max_new_tokens, when the
        context (seq_len) is full, or when every row has given stop_id; a row that has ended repeats it.
        seed: of this call's own generator; None leaves the choice to chance. repetition_penalty: as in penalise; it shows in
        the draw, not in the logits. What is yielded are inference tensors: clone one to use it where gradients are taken.
        """
        self.eval()
        device, padding = self.rope.device, None
        if isinstance(prompts, list):
            width = max(map(len, prompts))
            padding = torch.tensor([width - len(p) for p in prompts], device=device) if any(len(p) < width for p in prompts) else None
            prompts = torch.tensor([[p[-1]] * (width - len(p)) + list(p) for p in prompts], device=device)
        B, T = prompts.shape
        if not 0 < T <= self.config.seq_len:
            raise UserError(f"a prompt of {T} tokens does not fit into the context of {self.config.seq_len} (seq_len)")
        generator = torch.Generator(device)
        generator.manual_seed(seed) if seed is not None else generator.seed()
        cache = KVCache(self.config, B, min(self.config.seq_len, T + max_new_tokens), device, compute_dtype(self.embedding.weight))
        ended, idx = torch.zeros(B, dtype=torch.bool, device=device), prompts
        seen = torch.zeros(B, self.config.vocab_size, dtype=torch.bool, device=device).scatter_(1, prompts, True)
        for _ in range(min(max_new_tokens, self.config.seq_len - T)):
            logits = self(idx, cache=cache, padding=padding)["logits"][:, -1]
            new = pick(penalise(logits, seen, repetition_penalty), temperature, top_k, top_p, generator)
            if stop_id is not None:
                new = new.masked_fill(ended, stop_id)
                ended |= new == stop_id
            yield new, logits
            if ended.all():
                return
            idx = new[:, None]
            seen.scatter_(1, idx, True)

    def generate(self, prompts, max_new_tokens, **sampling):
        """Return the prompts with the generated ids behind them: a tensor of a tensor, lists of lists. As stream."""
        new = [ids.clone() for ids, _ in self.stream(prompts, max_new_tokens, **sampling)]
        if isinstance(prompts, list):
            return [list(prompt) + [ids[row].item() for ids in new] for row, prompt in enumerate(prompts)]
        return torch.cat((prompts, *(ids[:, None] for ids in new)), 1)


class Watch:
    """Collect, while it is entered, what routers choose and what populations give: lists with one entry per layer and forward pass."""

    def __init__(self, model):
        self.model, self.routes, self.twins = model, [], []

    def __enter__(self):
        moes = [block.moe for block in self.model.blocks if block.moe.router is not None]
        self.hooks = [moe.router.register_forward_hook(lambda _, __, out: self.routes.append(out[1:3])) for moe in moes]      # selected, gate
        self.hooks += [moe.experts.register_forward_hook(lambda _, __, out: self.twins.append(out.float())) for moe in moes]  # [N, P, d_model]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def penalise(logits, seen, penalty):
    """Make the ids seen [B, V] bool less likely: positive logits over the penalty, negative ones times it (arXiv 1909.05858, 4.1)."""
    return logits if penalty == 1 else torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def pick(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Choose an id per row of logits [B, V]: the largest at temperature 0, else a draw from the top_k likeliest
    (None or 0: all) and among them the fewest that together reach probability top_p (None: all) -> [B]."""
    if temperature < 1e-6:                          # the same choice, without an overflow
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature            # shifted first: a tiny temperature cannot overflow
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:], -math.inf)
    if top_p is not None and top_p < 1:
        sorted_p, order = logits.softmax(-1).sort(-1, descending=True)
        unlikely = sorted_p.cumsum(-1) - sorted_p >= top_p                      # the mass before it already reaches top_p
        unlikely[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(unlikely).scatter(1, order, unlikely), -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay on matrices only (embeddings, projections, expert banks), none on norm gains."""
    tensors = list(model.parameters())
    return [dict(params=[p for p in tensors if p.dim() > 1], weight_decay=weight_decay),
            dict(params=[p for p in tensors if p.dim() <= 1], weight_decay=0.0)]


# ----------------------------------------------------------------------------------------------------------
# Device, checkpoints, validation loss: what training, evaluation and sampling share
# ----------------------------------------------------------------------------------------------------------

def pick_device(device: str, dtype: str) -> tuple[torch.device, torch.dtype, str]:
    """Resolve the settings device and dtype; returns (device, dtype, a line that says what and why).

    "auto" takes the GPU if a tiny kernel runs on it, and BF16 from compute capability 8.0 on: older cards claim
    BF16 but emulate it. UserError where what was asked for is not there.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UserError(f'dtype={dtype}: must be "auto", "float32" or "bfloat16"')
    why = ""
    if device == "auto":
        device = "cpu"
        if torch.cuda.is_available():
            try:
                (torch.ones(2, device="cuda") * 2).sum().item()
                device = "cuda"
            except RuntimeError as error:           # a card this torch has no kernels for
                why = f" (the GPU {torch.cuda.get_device_name()} is not usable by this PyTorch: {str(error).splitlines()[0]})"
        else:
            why = " (PyTorch sees no GPU)"
    try:
        place = torch.device(device)
        assert place.type in ("cpu", "cuda", "mps"), "not one of cpu, cuda, mps"
        torch.ones(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device={device}: not usable here ({str(error).splitlines()[0]}) - try --device=auto") from None
    has_bf16 = place.type == "cuda" and torch.cuda.get_device_capability(place) >= (8, 0)
    if dtype == "bfloat16" and place.type != "cpu" and not has_bf16:
        raise UserError(f"dtype=bfloat16: {device} has no BF16 arithmetic - try --dtype=auto (float32 there)")
    chosen = torch.bfloat16 if dtype == "bfloat16" or dtype == "auto" and has_bf16 else torch.float32
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
    return place, chosen, f"device {name}, {str(chosen).removeprefix('torch.')}{why}"


def autocast(device: torch.device, dtype: torch.dtype):
    """The context forward passes run in: BF16 autocast over FP32 weights, or nothing in FP32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoints of a run, oldest step first (by number: file times lie after a copy)."""
    return sorted((p for p in Path(folder).glob("step_*.pt") if re.fullmatch("[0-9]+", p.stem[5:]) and p.is_file()), key=lambda p: int(p.stem[5:]))


def find_checkpoint(checkpoint: str | None, out_dir: str | Path) -> Path:
    """Resolve the setting checkpoint (a file, a run's folder or None) to a file.

    In a folder the best by validation loss, else the newest. None: in out_dir, or, where that is the default and empty,
    in the run below out/ whose newest checkpoint was written last.
    """
    if checkpoint is not None and Path(checkpoint).is_file():
        return Path(checkpoint)
    folder = Path(checkpoint or out_dir)
    found = list_checkpoints(folder)
    anywhere = checkpoint is None and Path(out_dir) == Path("out/cipher")
    if not found and anywhere:
        runs = [newest[-1] for run in Path("out").glob("*") if (newest := list_checkpoints(run))]
        if runs:
            folder = max(runs, key=lambda p: p.stat().st_mtime).parent
            found = list_checkpoints(folder)
    if not found:
        raise UserError(f"{folder}: no checkpoint here" + (" nor in any folder below out" if anywhere else "") +
                        " - train one first (python train.py), or give --checkpoint=FILE or --out_dir=FOLDER")
    best = folder / "best.json"
    if best.is_file():
        try:
            named = folder / Path(json.loads(best.read_text(encoding="utf-8"))["file"]).name
            if named.is_file():
                return named
        except (ValueError, TypeError, KeyError):
            print(f"{best}: damaged, taking the newest checkpoint instead")
    return found[-1]


def read_checkpoint(path: str | Path, mmap=False) -> dict:
    """Load a checkpoint file after checking its hash. UserError if it is missing, damaged or not one of ours."""
    path, side = Path(path), Path(f"{path}.sha256")
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    if (named := re.fullmatch(r"step_([0-9]+)\.pt", path.name)) is None and not side.is_file():
        raise UserError(f"{path}: no checkpoint (step_N.pt, or another file with its .sha256 beside it)")
    if not side.is_file():
        raise UserError(f"{path}: its hash file {side.name} is missing - copy it from the training machine too")
    if settings_rule.sha256_file(path).encode() != side.read_bytes()[:64]:
        raise UserError(f"{path}: damaged (its SHA-256 is not the one in {side.name}) - copy it again or take another checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if missing := {"model", "settings", "step", "tokenizer_sha256"} - state.keys():
            raise ValueError(f"without {', '.join(sorted(missing))}")
        architecture(state["settings"]), Path(state["settings"]["data_dir"]), state["step"] + 1, state["tokenizer_sha256"] + ""
        if wrong := [name for name, tensor in state["model"].items() if tensor.dtype != torch.float32]:
            raise ValueError(f"{wrong[0]} is not FP32")
        if named and int(named[1]) != state["step"]:
            raise ValueError(f"the checkpoint of step {state['step']} under another's name")
    except Exception as error:                      # unpickling a foreign file can raise nearly anything
        raise UserError(f"{path}: not a checkpoint of Cipher ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]})") from None
    return state


def load_checkpoint(path: str | Path, device="cpu", state: dict | None = None) -> tuple[Cipher, dict]:
    """Return (model in eval mode on device, the checkpoint's settings, step, hashes and probe). Weights alone are read, by mmap.

    state: what read_checkpoint gave, where that is at hand: the file is not hashed again.
    """
    state = state or read_checkpoint(path, mmap=True)
    with torch.device("meta"):
        model = Cipher(architecture(state["settings"]))
    try:
        model.load_state_dict({name: tensor.to(device, copy=True) for name, tensor in state["model"].items()}, assign=True)
    except RuntimeError as error:
        raise UserError(f"{path}: its weights do not fit its settings ({str(error).splitlines()[-1].strip()})") from None
    model.rope = rope_table(model.config).to(device)
    return model.eval(), state["settings"] | {name: state.get(name) for name in ("step", "tokenizer_sha256", "manifest_sha256", "probe")}


def over_ranks(*values: float, op="SUM") -> list[float]:
    """Return each value's SUM or MAX over the processes of this run, the same on all; alone, the values themselves."""
    result = torch.tensor(values, dtype=torch.float64)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(result, getattr(dist.ReduceOp, op))
    return result.tolist()


@torch.no_grad()
def mean_ce(model: nn.Module, batches: Iterable, context=None, **ablation) -> float:
    """Mean cross-entropy in nats per token over batches of (inputs, targets), every token weighing the same.

    The one validation loss of training, evaluation and verification, over the batches of all ranks. Leaves no trace:
    no dropout, no random numbers, no load counted. context: the autocast to run in; ablation: as in Router.forward.
    """
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    total, n = 0.0, 0
    for inputs, targets in batches:
        with context or nullcontext():
            total += model(inputs.to(device), targets.to(device), **ablation)["ce"].item() * targets.numel()
        n += targets.numel()
    model.train(was_training)
    total, n = over_ranks(total, n)
    return total / n


# ----------------------------------------------------------------------------------------------------------
# The sizing report
# ----------------------------------------------------------------------------------------------------------

PEAK = {"H100": 989e12, "A100": 312e12}             # dense BF16 FLOP/s of the SXM cards, from NVIDIA's data sheets


def peak_flops(device: torch.device) -> float | None:
    """Dense BF16 FLOP/s of the card, or None where it is not known: no MFU is better than a wrong one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    slower = any(word in name for word in ("PCIe", "NVL"))      # other clocks and fewer units under the same name
    return next((flops for card, flops in PEAK.items() if card in name and not slower), None)


def used_share(config: ModelConfig) -> float:
    """The share of routed experts that works on one token."""
    return config.top_k / (P * config.n_routed) if config.n_routed else 0.0


def count_parameters(config: ModelConfig) -> dict:
    """Parameters by part, total and active (those in one token's matrix products), counted on the model itself."""
    with torch.device("meta"):
        model = Cipher(config)
    parts = dict.fromkeys(("embedding", "attention", "router", "routed experts", "shared experts", "LM head", "norms"), 0)
    for name, tensor in model.named_parameters():
        part = ("norms" if tensor.dim() == 1 else "embedding" if "embedding" in name else "LM head" if name.startswith("head")
                else "attention" if "attention" in name else "router" if "router" in name
                else "routed experts" if ".experts." in name else "shared experts")
        parts[part] += tensor.numel()
    head = parts["LM head"] or parts["embedding"]
    active = parts["attention"] + parts["router"] + parts["shared experts"] + head + round(parts["routed experts"] * used_share(config))
    return parts | dict(total=sum(parts.values()), active=active)


def flops_per_token(config: ModelConfig) -> int:
    """FLOPs of training on one token, forward and backward: 6 per active parameter, and attention's causal half."""
    return 6 * count_parameters(config)["active"] + 6 * config.n_layers * config.n_heads * config.head_dim * config.seq_len


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside that are still there (now), and their peak."""

    def __enter__(self):
        self.now, self.peak, self.seen = 0, 0, weakref.WeakSet()
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self.seen:
                self.seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def free(self, size):
        self.now -= size


def activation_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes that one more token takes in a layer here: (kept for the backward pass, peak of the backward pass)."""
    mixed, found = dtype == torch.bfloat16, []
    sizes = (16, 48) if mixed else (512, 1536)      # BF16 is slow on a CPU; the difference leaves out weights and their copies
    small = ModelConfig(**asdict(config) | dict(n_layers=1, vocab_size=8, seq_len=sizes[1]))
    model = Cipher(small).train()
    for part in model.modules():
        if isinstance(part, Experts) and mixed:
            part.product_cost = 0                   # no padding, as with F.grouped_mm
    for tokens in sizes:
        x = torch.randn(1, tokens, config.d_model, requires_grad=True)
        with LiveBytes() as live, autocast(torch.device("cpu"), dtype):
            y, losses, _ = model.blocks[0](x, model.rope[:, :tokens])
            kept = live.now
            (y.sum() + sum(losses)).backward()
        found.append((kept, live.peak))
        model.zero_grad()
    return tuple((b - a) / (sizes[1] - sizes[0]) for a, b in zip(*found))


def training_memory(config: ModelConfig, tokens: int, dtype: torch.dtype) -> dict[str, float]:
    """Bytes by part while a micro-step of so many tokens trains. BF16 stands for a GPU: its chunks of logits are larger."""
    total, mixed = count_parameters(config)["total"], dtype == torch.bfloat16
    kept, peak = activation_bytes_per_token(config, dtype)
    logits = min(tokens * config.vocab_size, LOGITS_AT_ONCE[mixed])
    return {"weights, gradients and Adam moments in FP32": 16 * total,
            "BF16 copies of the weights": 2 * total * mixed,
            f"activations of {tokens:,} tokens": tokens * config.n_layers * kept,
            "gradient of the head": 4 * config.vocab_size * config.d_model,
            "a chunk of logits, or a layer's backward pass": max(10 * logits, tokens * (peak - kept))}


def main():
    settings = settings_rule.override(globals())
    if min(batch_size, grad_accum, max_tokens) < 1 or (max_hours or 1) <= 0:
        raise UserError(f"batch_size={batch_size}, grad_accum={grad_accum}, max_tokens={max_tokens} and max_hours={max_hours} must be positive")
    cfg = architecture(settings)
    parts = count_parameters(cfg)
    print("\nparameters")
    for name, n in parts.items():
        print(f"  {name:<16} {n:>13,}   {n / parts['total']:>6.1%}")
    flops, per_step = flops_per_token(cfg), batch_size * grad_accum * seq_len
    print(f"\nFLOPs per trained token: {flops / 1e9:.4f} G (active parameters x 6, attention's causal half)")
    print(f"step: {batch_size} sequences x {grad_accum} micro-steps x {seq_len} tokens = {per_step:,} tokens; "
          f"{max_tokens:,} tokens are {math.ceil(max_tokens / per_step):,} steps")

    micro, gib = batch_size * seq_len, 2 ** 30
    wide = torch.bfloat16 if require_bf16 else torch.float32
    memory = training_memory(cfg, micro, wide)
    print(f"\ntraining memory in {'BF16 autocast' if require_bf16 else 'FP32'} (arithmetic; activations counted on one layer)")
    for name, n in memory.items():
        print(f"  {name:<45} {n / gib:>8.2f} GiB")
    print(f"  {'together':<45} {sum(memory.values()) / gib:>8.2f} GiB")
    other = training_memory(ModelConfig(**asdict(cfg) | dict(checkpoint_moe=not checkpoint_moe)), micro, wide)
    print(f"  with checkpoint_moe={not checkpoint_moe} it would be {sum(other.values()) / gib:.2f} GiB; "
          f"recomputing the experts costs about {2 * (parts['shared experts'] + parts['routed experts'] * used_share(cfg)) / flops:.0%} more FLOPs")
    print(f"checkpoint on disk: {12 * parts['total'] / 1e9:.2f} GB (weights and two moments in FP32)")

    print("\nwhat the hardware allows (limits by arithmetic, not measurements)")
    print(f"  {'':<5} {'of peak':>8} {'tokens/s':>12} {'max_tokens in':>14}" + (f"   {max_hours:g} h buy" if max_hours else ""))
    for card, peak in PEAK.items():
        for share in (1, 0.4, 0.2, 0.1):
            rate = share * peak / flops
            print(f"  {card:<5} {share:>8.0%} {rate:>12,.0f} {max_tokens / rate / 3600:>12.2f} h" +
                  (f"   {rate * max_hours * 3600 / 1e9:>6.2f} G tokens" if max_hours else ""))

    try:
        data_tokens = json.loads((Path(data_dir) / "manifest.json").read_text(encoding="utf-8"))["splits"]["train"]["tokens"]
        passes = max_tokens / data_tokens
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        print(f"\nno prepared data in {data_dir}: passes over it are not known")
    else:
        print(f"\ndata: {data_tokens:,} training tokens in {data_dir}; max_tokens is {passes:.1f} passes over them")
        if passes > 4:
            print(f"  contradiction: more than about 4 passes stop paying (arXiv 2305.16264) - {max_tokens / 4 / 1e6:,.0f}M tokens of "
                  f"text would serve, or max_tokens={4 * data_tokens:,}")
        print(f"  rule of thumb, 20 tokens per active parameter (arXiv 2203.15556): {20 * parts['active'] / 1e6:,.0f}M tokens")
    if max_hours and (bought := 0.1 * PEAK["H100"] / flops * max_hours * 3600) > 2 * max_tokens:
        print(f"  contradiction: {max_hours:g} h on an H100 buy {bought / 1e9:.1f} G tokens even at 10 % of its peak, max_tokens asks for "
              f"{max_tokens / 1e9:.2f} G - the run ends early (and cheap), or raise max_tokens and prepare more text")


if __name__ == "__main__":
    settings_rule.run(main)
