"""Train the twin-population MoE: BF16 on a rented GPU, FP32 on a laptop, the same script.

    python train.py config/local_cpu.py                    a first model on two CPU cores
    python train.py config/cloud_h100.py --preflight=True  the rehearsal: before renting, and in the first minutes on the GPU
    python train.py config/cloud_h100.py                   the plan's model; start it again to resume
    python train.py config/local_cpu.py --max_tokens=5e6 --out_dir=out/longer
    torchrun --standalone --nproc_per_node=2 train.py config/cloud_h100.py      the same training on two GPUs

Reads data_dir (prepare.py). Writes into out_dir: config.json, tokenizer.json, metrics.jsonl, checkpoints
step_*.pt with their .sha256, best.json, clock.json, and done.json at the end. Starting again resumes from the newest valid
checkpoint and is, on the CPU, bit for bit the uninterrupted run. Ctrl-C or SIGTERM: finish the step, save, exit 0.
"""
import collections
import contextlib
import gc
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import config
from config import UserError
from model import (POPULATIONS, Cipher, P, architecture, autocast, choose_branch, count_parameters, flops_per_token, head_loss,
                   list_checkpoints, mean_ce, over_ranks, parameter_groups, peak_flops, pick_device, read_checkpoint)
from prepare import TokenStream, read_manifest, save_synced
from tokenizer import load_tokenizer

# where
data_dir = "data/cipher"
out_dir = "out/cipher"
resume = True            # False: refuse to touch an out_dir that holds a run
seed = 1337
device = "auto"          # auto, cpu, cuda, cuda:1, mps
dtype = "auto"           # auto: bfloat16 where the GPU has it, else float32
require_bf16 = False     # True in cloud files: stop rather than spend money on a box without a usable GPU
# architecture, as in model.py
vocab_size = 32768
d_model = 512
n_layers = 12
n_heads = 8
n_kv_heads = 2
head_dim = 64
n_routed = 32            # routed experts per population; 0 = dense
n_shared = 2
top_k = 4
expert_d_ff = 128
seq_len = 2048
dropout = 0.1
tie_embeddings = False
checkpoint_moe = True
# budget: whichever ends first ends the run, cooled down
max_tokens = 100_000_000
max_hours: float | None = None   # of training time, over all resumes
max_passes = 4.0         # over the training data; more than about 4 stop paying (arXiv 2305.16264)
gpu_dollars_per_hour: float | None = None   # of one, to say what the run costs
gpu: str | None = None   # words of which one is in the name of the card this was made for; None = any card
# optimizer
batch_size = 16          # sequences per micro-step
grad_accum = 3           # micro-steps per step, of all GPUs together: 48 sequences
lr = 3e-4                # peak, held between warm-up and cooldown
min_lr = 0.0             # at the end of the cooldown
warmup_steps = 200       # at most a tenth of the run
schedule = "wsd"         # "wsd": warm-up, hold, linear cooldown; "cosine"
cooldown = 0.2           # last share of the budget in which wsd takes lr to min_lr
weight_decay = 0.1       # on matrices only
grad_clip = 1.0          # global norm
# losses beside the cross-entropy, and balancing
z_loss_weight = 0.001    # router logits' squared logsumexp
ortho_weight = 0.01      # squared cosine between the populations' outputs
bias_update_rate = 0.01  # a bias moves by at most this per step; falls to 0 in the cooldown
# watching and saving
eval_interval = 100      # steps
eval_tokens = 500_000    # of the validation split, always the same windows
log_interval = 10        # steps
checkpoint_minutes = 30.0
keep_checkpoints: int | None = None   # None = all; else the newest so many, and the best
patience: int | None = 10   # evaluations without a new best until the cooldown begins early; None = never
wandb_log = False        # also to Weights & Biases; WANDB_MODE=offline keeps it on this machine
tensorboard_log = False  # also into out_dir/tensorboard
# speed
compile = False          # torch.compile the blocks: pays on an A100 or H100, takes a minute or two at start
benchmark = False        # True: time a few steps part by part on this machine, write nothing, stop
preflight = False        # True: all checks, a few steps, a save and a resume, then a verdict; without a GPU with one sequence

BEST_SAVE_SECONDS = 300      # a new best is saved at most this often
HEALTH_STEPS = 100           # routing is judged over so many steps at a time, from the end of the warm-up on
SKIPS_IN_A_ROW = 10          # non-finite gradients before the run goes back to a checkpoint
PROBE_WINDOWS = 2            # of the validation split, whose loss is noted in every checkpoint
CLOCK_SECONDS = 5            # how much of the clock a kill may forget
MEASURED_STEPS = 5           # after the first of a start, before the run is forecast
HOPELESS_HOURS = 48          # a run estimated longer than this, without max_hours, is refused


# ----------------------------------------------------------------------------------------------------------
# Checks before anything is spent
# ----------------------------------------------------------------------------------------------------------

def check_settings() -> None:
    """Rules between settings; UserError with a line for each broken one."""
    rules = [(min(batch_size, grad_accum, eval_interval, log_interval, max_tokens) >= 1,
              f"batch_size={batch_size}, grad_accum={grad_accum}, eval_interval={eval_interval}, log_interval={log_interval}, "
              f"max_tokens={max_tokens} must all be 1 or more"),
             (max_tokens <= 10 ** 15 and batch_size * grad_accum * seq_len < 1 << 31,
              f"max_tokens={max_tokens} must be 10^15 or less, and a step, batch_size={batch_size} x grad_accum={grad_accum} x seq_len={seq_len}, below 2^31 tokens"),
             (schedule in ("wsd", "cosine"), f'schedule={schedule}: must be "wsd" or "cosine"'),
             (0 < cooldown <= 1, f"cooldown={cooldown} must be above 0 and at most 1"),
             (0 <= min_lr <= lr and lr > 0, f"lr={lr} must be positive and min_lr={min_lr} between 0 and lr"),
             (grad_clip > 0, f"grad_clip={grad_clip} must be positive"),
             (min(weight_decay, z_loss_weight, ortho_weight, bias_update_rate, warmup_steps) >= 0,
              "weight_decay, z_loss_weight, ortho_weight, bias_update_rate and warmup_steps must not be negative"),
             (max_hours is None or max_hours > 0, f"max_hours={max_hours} must be positive, or None"),
             (keep_checkpoints is None or keep_checkpoints >= 1, f"keep_checkpoints={keep_checkpoints} must be 1 or more, or None"),
             (patience is None or patience >= 1, f"patience={patience} must be 1 or more, or None"),
             (checkpoint_minutes >= 1e-6, f"checkpoint_minutes={checkpoint_minutes} must be 1e-6 or more"),
             (0 <= seed < 1 << 63, f"seed={seed} must be from 0 to 2^63 - 1"),
             (max_passes > 0, f"max_passes={max_passes} must be positive"),
             (gpu_dollars_per_hour is None or gpu_dollars_per_hour >= 0, f"gpu_dollars_per_hour={gpu_dollars_per_hour} must not be negative"),
             (Path(out_dir).absolute() != Path(data_dir).absolute(), f"out_dir={out_dir} must not be data_dir"),
             *((not wanted or importlib.util.find_spec(package), f"{package}_log=True needs a package that is not here: pip install {package}")
               for wanted, package in ((wandb_log, "wandb"), (tensorboard_log, "tensorboard"))),
             (eval_tokens >= seq_len, f"eval_tokens={eval_tokens} must be at least one window, seq_len={seq_len}")]
    if mistakes := [text for good, text in rules if not good]:
        raise UserError("\n".join(mistakes))


def estimate_hours(place: torch.device, flops: float) -> float:
    """Hours for max_tokens at half the speed of an FP32 matrix product, timed here (0.3 s). For a CPU or an old GPU."""
    a, b = torch.randn(1024, 512, device=place), torch.randn(512, 1024, device=place)
    (a @ b).sum().item()
    start, n = time.perf_counter(), 0
    while time.perf_counter() - start < 0.3:
        (a @ b).sum().item()
        n += 1
    per_second = 2 * 1024 * 512 * 1024 * n / (time.perf_counter() - start)
    return max_tokens * flops / (0.5 * per_second) / 3600


def check_card(name: str) -> None:
    """Refuse a card this configuration was not made for, with the file that was."""
    if gpu is None or any(word in name for word in gpu.split()):
        return
    files = [file for file in sorted((config.ROOT / "config").glob("cloud_*.py")) if any(word in name for word in str(config.read_config(str(file)).get("gpu")).split())]
    raise UserError(f"gpu={gpu}: this configuration was made for such a card, and here is {name} - " + (
        f"take {' or '.join(f'config/{file.name}' for file in files)}" if files else "python model.py prints what it needs") + "; --gpu=None tries it all the same")


def check_device(place: torch.device, number: torch.dtype, said: str, flops: float) -> None:
    """Refuse what is hopeless on this machine, with the estimate and the better command."""
    if place.type == "cuda":
        check_card(torch.cuda.get_device_name(place))
    if number == torch.bfloat16 and place.type == "cuda":
        return
    hours = estimate_hours(place, flops)
    better = "python train.py config/local_cpu.py trains a first model here in minutes"
    if require_bf16:
        raise UserError(f"this configuration needs a GPU with BF16 (A100, H100): {said}; {max_tokens:,} tokens would take about "
                        f"{hours:,.0f} hours here - {better}; --require_bf16=False --max_tokens=N tries this one all the same")
    if hours > HOPELESS_HOURS and max_hours is None:
        raise UserError(f"{max_tokens:,} tokens of this model would take about {hours:,.0f} hours here ({said}) - {better}; "
                        f"--max_hours=N or a smaller --max_tokens goes on all the same")


# ----------------------------------------------------------------------------------------------------------
# Speed
# ----------------------------------------------------------------------------------------------------------

def total_loss(result: dict) -> torch.Tensor:
    """What is minimised; every term is a mean over tokens, so accumulation and world size do not change its scale."""
    return result["ce"] + z_loss_weight * result["z"] + ortho_weight * result["ortho"]


def micro_step(model: Cipher, inputs, targets, place: torch.device, number: torch.dtype) -> None:
    """Forward and backward as in the loop below, for timing and trying."""
    with autocast(place, number):
        result = model(inputs, targets)
    (total_loss(result) / grad_accum).backward()


def try_compile(model: Cipher, place: torch.device, number: torch.dtype) -> str:
    """Compile the blocks in place and try them forward and backward; on any failure go back to eager. Returns what to say.

    Without F.grouped_mm the experts' shapes follow the routing, so that only attention is compiled. Changes no
    weight and leaves no gradient; random numbers are drawn (seed afterwards).
    """
    grouped = all(block.moe.experts is None or block.moe.experts.product_cost is None for block in model.blocks)
    parts = [block if grouped else block.attention for block in model.blocks]
    started = time.monotonic()
    try:
        for part in parts:
            part.compile(dynamic=False)
        idx = torch.zeros(batch_size, seq_len, dtype=torch.int64, device=place)
        micro_step(model, idx, idx, place, number)
        said = f"compiled {'the blocks' if grouped else 'attention'} in {time.monotonic() - started:.0f} s"
    except Exception as error:                      # a missing compiler shows in many ways, and none is worth ending a run
        for part in parts:
            part._compiled_call_impl = None
        said = f"compile failed, going on in eager mode ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]})"
    model.zero_grad(set_to_none=True)
    return said


def print_benchmark(model: Cipher, optimizer, place: torch.device, number: torch.dtype, flops: float, peak: float | None) -> None:
    """Time a step and its parts on this device, on random tokens, and print what the run would take."""
    def seconds(work) -> float:
        """Median of 5 runs after 2 to warm up; of one where a run takes longer than 10 s."""
        times = []
        for i in range(7):
            began = time.perf_counter()
            work()
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            times.append(time.perf_counter() - began)
            if times[-1] > 10:
                return times[-1]
        return sorted(times[2:])[2]

    idx = torch.randint(vocab_size, (batch_size, seq_len + 1), device=place)
    inputs, targets = idx[:, :-1].contiguous(), idx[:, 1:].contiguous()
    x = torch.randn(batch_size, seq_len, d_model, device=place, requires_grad=True)
    flat, block, weight = x.flatten(0, 1).detach().requires_grad_(), model.blocks[0], model.embedding.weight if tie_embeddings else model.head.weight

    def backward(forward):
        def work():
            with autocast(place, number):
                y = forward()
            y.backward(torch.ones_like(y))
        return work

    micro_step(model, inputs, targets, place, number)           # Adam's moments must be there when memory peaks
    optimizer.step()
    whole = seconds(lambda: micro_step(model, inputs, targets, place, number))
    parts = {"attention": n_layers * seconds(backward(lambda: block.attention(block.norm1(x), model.rope)))}
    if n_routed:
        parts["router"] = n_layers * seconds(backward(lambda: block.moe.router(flat)[2].sum((1, 2))))      # of the gates
    parts["experts"] = n_layers * seconds(backward(lambda: block.moe(flat)[0])) - parts.get("router", 0)
    parts["head and loss"] = seconds(backward(lambda: head_loss(flat, weight, targets.flatten())))
    parts = {name: grad_accum * s for name, s in parts.items()}
    parts["optimizer"] = seconds(optimizer.step)
    step = grad_accum * whole + parts["optimizer"]
    parts["embedding, norms, residuals, the rest"] = step - sum(parts.values())
    print(f"\n  {'part':<40} {'ms a step':>10} {'share':>7}" + (
        "   (parts are timed one by one; compiled in the step alone, they can exceed it)" if compile else ""))
    for name, s in parts.items():
        print(f"  {name:<40} {1000 * s:>10.1f} {s / step:>7.1%}")
    rate = batch_size * grad_accum * seq_len / step
    print(f"  {'step':<40} {1000 * step:>10.1f}")
    print(f"{rate:,.0f} tokens/s, {rate * flops / 1e12:.3g} TFLOP/s of active parameters" + (
        f", MFU {rate * flops / peak:.1%}" if peak else " (no MFU: the peak of this device is not known)"))
    if place.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated(place) / 2 ** 30:.1f} of {torch.cuda.get_device_properties(place).total_memory / 2 ** 30:.0f} GiB")
    print(f"max_tokens={max_tokens:,} would take {max_tokens / rate / 3600:.2f} hours" + (
        f"; max_hours={max_hours:g} buys {rate * max_hours * 3600:,.0f} tokens" if max_hours else ""))
    try:
        n = read_manifest(data_dir)["splits"]["train"]["tokens"]
        print(f"that is {max_tokens / n:.1f} passes over the {n:,} tokens in {data_dir}" + (
            f"; the hours would be {rate * max_hours * 3600 / n:.1f}" if max_hours else ""))
    except UserError:
        print(f"no prepared data in {data_dir}: passes are not known")


# ----------------------------------------------------------------------------------------------------------
# Schedule
# ----------------------------------------------------------------------------------------------------------

def schedule_factors(step: int, planned_steps: int, progress: float) -> tuple[float, float]:
    """Return (learning rate, bias update rate) for a step at progress 0 ... 1 of the budget.

    A pure function of both, so that a resumed run goes on where it was.
    """
    if schedule == "wsd":
        fall = min(1.0, (1 - progress) / cooldown)
    else:
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    # a tenth of a run that the clock ends is not known in steps: then by progress, but in ten steps at least
    warm = min(1.0, max((step + 1) / max(1, min(warmup_steps, math.ceil(0.1 * planned_steps))), min(progress / 0.1, (step + 1) / 10)))
    return warm * (min_lr + (lr - min_lr) * fall), bias_update_rate * min(1.0, fall)


# ----------------------------------------------------------------------------------------------------------
# Checkpoints
# ----------------------------------------------------------------------------------------------------------

def fresh_state() -> dict:
    """What a run is besides weights, moments and random numbers: plain values, all of them in every checkpoint."""
    return dict(step=0, tokens=0, hours=0.0, token_offset=0,     # of the next window in the data; ahead of tokens after going back
                last_eval=-1, val_ce=None, best_val_ce=math.inf, before_cooldown=None,
                probe=None, run_id=os.urandom(4).hex(),          # for evaluate.py --verify; for wandb
                since_best=0, end=1.0,                           # evaluations since the best; share of the budget at which the run ends
                eval_seconds=0.0, save_seconds=0.0)              # of the last; the end of the budget is kept for both


def rng_state(place: torch.device) -> dict:
    """The state of this rank's generators, as plain types and tensors (weights_only refuses NumPy's arrays)."""
    kind, keys, *rest = np.random.get_state()
    return dict(torch=torch.get_rng_state(), cuda=torch.cuda.get_rng_state(place) if place.type == "cuda" else None,
                numpy=[kind, keys.tolist(), *rest], python=random.getstate())


def set_rng_state(states: list[dict], place: torch.device) -> None:
    """Take up this rank's generators of a checkpoint; where it had fewer ranks or no GPU, the seed's stay."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = states[rank] if rank < len(states) else None
    if own is None or (own["cuda"] is None) != (place.type != "cuda"):
        print("other processes or devices than at the checkpoint: dropout goes on with other random numbers")
    if own is not None:
        torch.set_rng_state(own["torch"])
        if own["cuda"] is not None and place.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], place)
        np.random.set_state((own["numpy"][0], np.array(own["numpy"][1], np.uint32), *own["numpy"][2:]))
        random.setstate(own["python"])


def write_checkpoint(path: Path, state: dict) -> None:
    """Write path whole or not at all: aside, synced, hashed; the hash file first, then the rename."""
    aside = Path(f"{path}.tmp")
    try:
        save_synced(state, aside)
        config.write_text(f"{path}.sha256", f"{config.sha256_file(aside)}  {path.name}\n")   # as sha256sum -c reads it
        config.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


WHOLE = {"optimizer", "rng", "tokenizer_sha256", "manifest_sha256", *fresh_state()}     # what resuming needs beside what load_checkpoint does


def is_run_folder(folder: Path) -> bool:
    """True where nothing in a folder without checkpoints would be lost: no file of our names, or those of a run of ours."""
    if not any((folder / name).exists() for name in ("config.json", "tokenizer.json", "metrics.jsonl", "manifest.json", "best.json", "clock.json", "done.json")):
        return True
    try:
        return "bias_update_rate" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def newest_valid(folder: Path) -> tuple[Path | None, dict | None]:
    """Return the newest whole checkpoint of a folder and its content, (None, None) where there is none at all.

    Damaged newer ones are named and set aside as *.damaged. If all are damaged, nothing is touched: UserError.
    """
    damaged = []
    for path in reversed(list_checkpoints(folder)):
        try:
            content = read_checkpoint(path)
            if lacking := WHOLE - content.keys():
                raise UserError(f"{path}: not a whole checkpoint, without {', '.join(sorted(lacking))}")
        except (UserError, OSError) as error:
            damaged.append(path)
            print(f"passed over: {error}")
            continue
        for old in damaged:
            config.replace(old, f"{old}.damaged")
            if (side := Path(f"{old}.sha256")).exists():        # alone it would fail sha256sum -c
                config.replace(side, f"{side}.damaged")
            print(f"set aside as {old.name}.damaged")
        return path, content
    if damaged:
        raise UserError(f"{folder}: none of its {len(damaged)} checkpoints is whole - copy them again with their .sha256, or choose another --out_dir")
    return None, None


def check_same_run(path: Path, before: dict, settings: dict, hashes: dict) -> None:
    """Refuse to continue a checkpoint with another model, data, order or tokenizer; report other differences."""
    then = before["settings"]
    fixed = [*architecture(settings).__dataclass_fields__, "seed"]
    # dropout and recomputation change no shape and no data; a run may change them on the way
    hard = [n for n in fixed if n not in ("dropout", "checkpoint_moe")]
    wrong = [f"{n}={then[n]!r} there, {settings[n]!r} now" for n in hard if then[n] != settings[n]]
    wrong += [f"another {n.removesuffix('_sha256')}" for n in hashes if before[n] != hashes[n]]
    if wrong:
        raise UserError(f"{path}: the checkpoint is of another run ({'; '.join(wrong)}) - set these back, or choose another --out_dir")
    if changed := [f"{n}={then.get(n)!r} -> {settings[n]!r}" for n in settings if n not in hard and then.get(n) != settings[n]]:
        print("changed since the checkpoint:", ", ".join(changed))


def finished_before(out: Path) -> tuple[bool, str | None]:
    """Return whether the run in a folder is finished, and the name of its checkpoint from before the cooldown."""
    if list_checkpoints(out) and not resume:
        raise UserError(f"{out}: holds a run already - leave out --resume=False to continue it, or choose another --out_dir")
    if not (out / "done.json").exists():
        return False, None
    try:
        return True, json.loads((out / "done.json").read_text(encoding="utf-8"))["before_cooldown"]
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{out / 'done.json'}: damaged - remove it, and the run is taken up again") from None


def claim(out: Path, checkpoint_bytes: int):
    """Make the folder and lock it for this process: keep what is returned. UserError where it is another's or too full."""
    if out.exists() and not list_checkpoints(out) and not is_run_folder(out):
        raise UserError(f"{out}: holds files of something else that this run would overwrite - choose another --out_dir")
    out.mkdir(parents=True, exist_ok=True)
    held = config.lock(out)
    if (free := shutil.disk_usage(out).free) < 2 * checkpoint_bytes:
        raise UserError(f"{out}: {free / 1e9:.1f} GB free on this disk, and a checkpoint takes {checkpoint_bytes / 1e9:.1f} - make room for two or "
                        f"more, or choose an --out_dir on another disk")
    return held


def checkpoints_to_come(hours: float) -> int:
    """How many checkpoints so many hours leave on the disk: by the clock, before the cooldown, and a best or the last."""
    coming = math.ceil(hours * 60 / checkpoint_minutes) + 2
    return coming if keep_checkpoints is None else min(coming, keep_checkpoints + 3)


def peak_memory_gib(place: torch.device) -> float | None:
    """The most memory used so far: of the GPU by tensors, else of the process. None where the system does not say."""
    if place.type == "cuda":
        return torch.cuda.max_memory_allocated(place) / 2 ** 30
    try:
        import resource
    except ImportError:                             # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)


def read_side_files(out: Path, hours: float) -> tuple[dict, float]:
    """Return the best checkpoint as best.json has it and the hours of training so far, given those at the checkpoint."""
    best = dict(file=None, step=None, val_ce=math.inf)
    try:
        read = json.loads((out / "best.json").read_text(encoding="utf-8"))
        if (out / str(read["file"])).is_file() and math.isfinite(read["val_ce"]):
            best = {name: read[name] for name in best}
    except (OSError, ValueError, TypeError, KeyError):          # none yet, or not readable: the next best is written anew
        pass
    try:                                                        # the hours behind the last checkpoint were paid for too
        noted = json.loads((out / "clock.json").read_text(encoding="utf-8"))["hours"] + 0.0
        if hours < noted < math.inf:
            print(f"{(noted - hours) * 60:.1f} minutes of training behind that checkpoint were lost; they count towards max_hours")
            hours = noted
    except (OSError, ValueError, TypeError, KeyError):          # none yet, or not readable: the checkpoint's clock stands
        pass
    return best, hours


def restore(path: Path | None, content: dict | None, model: Cipher, optimizer, place: torch.device) -> dict | None:
    """Take up rank 0's checkpoint on every rank and return its state; None where there is none. Only rank 0 has read it."""
    if content is not None:
        try:
            model.load_state_dict(content["model"])
            optimizer.load_state_dict(content["optimizer"])
            missing = [n for n, p in model.named_parameters() if "exp_avg" not in optimizer.state[p]]
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"{path}: does not fit this model ({str(error).splitlines()[-1].strip()[:150]}) - choose another --out_dir") from None
        if missing:
            raise UserError(f"{path}: holds no Adam moments for {missing[0]} - resume from another checkpoint")
    rest = share(content and {name: content[name] for name in ("rng", *fresh_state())})
    if rest is None:
        return None
    if dist.is_initialized():                       # so that no other rank needs the folder
        moments = []
        for p in model.parameters():
            own = optimizer.state[p]
            for name in ("exp_avg", "exp_avg_sq", "step"):
                moments.append(own.setdefault(name, torch.zeros((), device=place) if name == "step" else torch.zeros_like(p)))
        for tensor in [*model.state_dict().values(), *moments]:
            dist.broadcast(tensor, 0)
    for group, own in zip(optimizer.param_groups, parameter_groups(model, weight_decay)):
        group["weight_decay"] = own["weight_decay"]             # as given now, like lr in the loop
    set_rng_state(rest.pop("rng"), place)
    return rest


def trim_metrics(file: Path, state: dict) -> None:
    """Take out the rows behind a state: they will be written again."""
    def keep(line):
        try:
            row = json.loads(line)
            return row["step"] < state["step"] or row["step"] == state["step"] and ("val_ce" not in row or state["last_eval"] == row["step"])
        except (ValueError, TypeError, KeyError):               # half a line, or not ours
            return False
    if not state["step"] and file.exists() and file.stat().st_size:             # of a run that begins anew: what it was is kept
        config.replace(file, f"{file}.old")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(True) if file.exists() else []
    config.write_text(file, "".join(line for line in lines if line.endswith("\n") and keep(line)))


# ----------------------------------------------------------------------------------------------------------
# Preflight: the run in small, with a verdict
# ----------------------------------------------------------------------------------------------------------

def stamp(settings: dict, hashes: dict) -> dict[str, str]:
    """SHA-256 of what a preflight vouches for: the scripts (as text, whatever the line ends), the settings and the data."""
    here, code = Path(__file__).parent, hashlib.sha256()
    for name in ("train.py", "model.py", "prepare.py", "tokenizer.py", "config/__init__.py"):
        code.update((here / name).read_text(encoding="utf-8").encode())
    kept = {name: value for name, value in settings.items() if name not in ("preflight", "benchmark", "resume")}
    return dict(code=code.hexdigest(), settings=hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest(), data=hashes["manifest_sha256"])


def say_preflight(out: Path, settings: dict, hashes: dict) -> None:
    """Say whether the preflight's stamp is of this run."""
    try:
        read = json.loads((out / "preflight.json").read_text(encoding="utf-8"))
        other = [name for name, digest in stamp(settings, hashes).items() if read[name] != digest]
        print(f"preflight: passed on {read['device']}" + (f", but with other {' and '.join(other)}: --preflight=True tries this run" if other else ""))
    except (OSError, ValueError, TypeError, KeyError):
        pass                                        # none was made


def rehearse(settings: dict, hashes: dict, out: Path, place: torch.device, passes: float, checkpoint_bytes: int) -> None:
    """Train 4 steps in a folder of its own, saving at the 2nd; resume from there, compare, judge. SystemExit(1) if it fails.

    In processes of their own, as a run and its resume are. Without a GPU: one sequence, in FP32, eagerly.
    """
    folder, small = out / ".preflight", place.type == "cpu"
    (out / "preflight.json").unlink(missing_ok=True)            # what it vouched for is in doubt now
    shutil.rmtree(folder, ignore_errors=True)                   # left by one that was killed
    for name in ("SIGTERM", "SIGHUP"):                          # the process it has started ends with it
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:
            signal.signal(getattr(signal, name), lambda which, frame: sys.exit(128 + which))
    sizes = dict(batch_size=1, grad_accum=1, compile=False, require_bf16=False) if small else dict(batch_size=batch_size, grad_accum=grad_accum)
    tokens = 4 * sizes["batch_size"] * sizes["grad_accum"] * seq_len
    changes = sizes | dict(out_dir=str(folder), preflight=False, resume=True, max_tokens=tokens, max_hours=None, max_passes=1e9, schedule="wsd", cooldown=0.6,
                           eval_interval=1000, eval_tokens=2 * seq_len, log_interval=1, checkpoint_minutes=1e6, patience=None, wandb_log=False, tensorboard_log=False)
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in (settings | changes).items())]
    runs = []
    try:
        for what in ("4 steps, saved before the 3rd and at the end", "steps 3 and 4 again, resumed from the first checkpoint"):
            print(f"  training {what}", flush=True)
            child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace")
            saved = (folder / "step_00000002.pt").is_file() and ("resumed from" in child.stdout) == bool(runs)
            if child.returncode or not (folder / "done.json").exists() or not saved:
                tail = [line for line in child.stdout.splitlines() if "error:" in line or "NOT saved" in line] or child.stdout.splitlines()[-1:]
                print("\n".join(tail) + f"\npreflight: FAILED (exit code {child.returncode})")
                raise SystemExit(1)
            runs.append([json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()])
            if not runs[1:]:
                for name in ("step_00000004.pt", "step_00000004.pt.sha256", "done.json"):
                    (folder / name).unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # steps 1 to 4, then the evaluation; null stands for what is not finite
    losses, again = ([row.get("ce", row.get("val_ce")) for row in rows] + [row["grad_norm"] for row in rows[:4]] for rows in runs)
    finite = None not in losses + again
    apart = max(abs(a - b) for a, b in zip(losses, again)) if finite else math.inf
    rate, memory = runs[0][3]["tokens_per_s"], max(row["memory_gib"] or 0.0 for rows in runs for row in rows[:4])
    hours = min(max_tokens / rate / 3600, max_hours or math.inf)
    free = shutil.disk_usage(out).free
    coming = checkpoints_to_come(0 if small else hours)
    arithmetic = next((line for line in child.stdout.splitlines() if line.startswith("device ")), str(place))     # and how the experts run
    checks = [("device", True, f"{arithmetic}; torch {torch.__version__}" + (f", CUDA {torch.version.cuda}, {torch.cuda.get_device_properties(place).total_memory / 2 ** 30:.0f} GiB"
                                                                             if place.type == "cuda" else "")),
              ("data", True, f"{passes:.2f} passes, shards and tokenizer as the manifest says"),
              ("folder", True, f"{out} can be written and locked"),
              ("disk", coming * checkpoint_bytes <= free, f"{free / 1e9:.1f} GB free, {coming} checkpoints take {coming * checkpoint_bytes / 1e9:.1f}"
               + (" (more on the GPU: it decides how many)" if small else "")),
              ("4 steps", finite, f"ce {losses[0]:.3f} to {losses[3]:.3f}, validation {losses[4]:.3f}; a blind guess has {math.log(vocab_size):.3f}"
               if finite else "a loss or gradient is not finite: lower lr"),
              ("save and resume", apart == 0 if small else apart < 0.01, "bit for bit" if apart == 0 else f"differs by {apart:.2g}"),
              ("memory", True, f"{memory:.1f} GiB at most" if memory else "not known on this system"),
              ("speed", True, f"{rate:,.0f} tokens/s on {place}" + (" says nothing of a GPU: run this again there" if small else
               f"; the run takes {hours:.2f} hours" + (f" and {hours * gpu_dollars_per_hour:,.2f} dollars" if gpu_dollars_per_hour is not None else "")))]
    for name, good, said in checks:
        print(f"  {name:<16} {'pass' if good else 'FAIL'}   {said}")
    if not all(good for _, good, _ in checks):
        print("preflight: FAILED")
        raise SystemExit(1)
    config.write_text(out / "preflight.json", json.dumps(dict(device=torch.cuda.get_device_name(place) if place.type == "cuda" else str(place)) | stamp(settings, hashes)) + "\n")
    print(f"preflight: passed, stamped into {out / 'preflight.json'}")


# ----------------------------------------------------------------------------------------------------------
# Trackers: metrics.jsonl has everything; these are for looking on
# ----------------------------------------------------------------------------------------------------------

def curves(row: dict) -> dict[str, float]:
    """The figures of a line of the metrics, one name each: lists are by layer. Loads per expert are for evaluate.py --plot."""
    flat = {}
    for name, value in row.items():
        if name not in ("step", "load") and value is not None:
            flat |= {f"{name}/layer_{i:02d}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
    return flat


def open_trackers(out: Path, settings: dict, state: dict) -> list:
    """Return (name, log(row), close()) for each tracker that is wanted. One that does not answer costs a line, not the run."""
    trackers = []
    if tensorboard_log:
        try:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(out / "tensorboard", purge_step=state["step"] + 1)
            trackers.append(("tensorboard", lambda row: [writer.add_scalar(name, value, row["step"]) for name, value in curves(row).items()], writer.close))
        except Exception as error:                  # a broken installation, a file in the way: looking on must not end a run
            print(f"warning: tensorboard does not start ({(str(error).splitlines() or [''])[0][:120]}); going on without")
    for mode in (None, "offline") if wandb_log else ():         # None: as the environment says
        try:
            import wandb
            run = wandb.init(project="cipher", name=out.name, id=state["run_id"], resume="allow", dir=out, config=settings, mode=mode,
                             settings=wandb.Settings(init_timeout=5))
            trackers.append(("wandb", lambda row: run.log(curves(row), step=row["step"]), run.finish))
            break
        except Exception as error:                  # no network, no login, a full disk, an odd version: each has a class of its own
            print(f"warning: wandb does not start ({(str(error).splitlines() or [''])[0][:120]}); {'trying offline' if mode is None else 'going on without'}")
            with contextlib.suppress(Exception):
                wandb.teardown()                    # a run that failed to start would hold the id
    return trackers


# ----------------------------------------------------------------------------------------------------------
# Health: what goes wrong without ending a run, in a line with a remedy
# ----------------------------------------------------------------------------------------------------------

def routing_faults(load: torch.Tensor, overlap: float) -> dict[str, str]:
    """Return {kind: warning} for loads [L, P, E], in tokens over HEALTH_STEPS steps, and the populations' mean overlap."""
    faults, E, K = {}, load.size(-1), top_k // P
    if E > K:                                       # else every expert takes every token
        share = load.double() / load.sum(-1, keepdim=True).clamp(min=1)
        limit = min(0.9 / K, max(0.5 / K, 4 / E))   # 1/K is all an expert can take: every token once
        places = [(f"layer {layer} {name}", shares) for layer, populations in enumerate(share.tolist()) for name, shares in zip(POPULATIONS, populations)]
        if dead := [f"{place} {shares.count(0)} of {E}" for place, shares in places if 0 in shares]:
            faults["dead experts"] = (f"experts without a token in {HEALTH_STEPS} steps: {', '.join(dead)} - raise bias_update_rate (now {bias_update_rate}), "
                                      f"or train with fewer experts")
        if taken := [f"{place} expert {shares.index(max(shares))} takes {max(shares) * K:.0%} of the tokens" for place, shares in places if max(shares) > limit]:
            faults["collapse"] = f"the routing collapses: {', '.join(taken)}, even is {K / E:.0%} - raise bias_update_rate (now {bias_update_rate}) or lower lr (now {lr})"
    if overlap > 0.3:
        faults["merging"] = f"the populations merge: overlap {overlap:.2f}, above 0.3 - raise ortho_weight (now {ortho_weight})"
    return faults


def is_spike(ce: float, before: list[float]) -> bool:
    """True where a loss stands out above those before it: by 6 standard deviations as their median deviation gives them, and 0.5 nats."""
    if len(before) < 10:
        return False
    middle = statistics.median(before)
    return ce > middle + max(0.5, 6 * 1.4826 * statistics.median(abs(x - middle) for x in before))


# ----------------------------------------------------------------------------------------------------------
# Ranks: the processes of one run, one per GPU. Without torchrun there is one, and all of this is nothing
# ----------------------------------------------------------------------------------------------------------

def choose_gpu() -> None:
    """Under torchrun: take this process's own GPU before anything touches the first."""
    here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if device not in ("auto", "cuda", "cpu"):
        raise UserError(f'device={device}: under torchrun each process takes its own GPU - leave out --device, or set it to "cuda" or "cpu"')
    if gpus and device != "cpu":
        if here > gpus:
            raise UserError(f"{here} processes on this machine, but {gpus} GPUs - set torchrun's --nproc_per_node={gpus}")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def share(content):
    """Return rank 0's content on every rank. Plain types and small tensors: it is pickled."""
    box = [content]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


# ----------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------

class Interrupted(Exception):
    """A stop was asked for during an evaluation."""


def build(cfg, place: torch.device, number: torch.dtype):
    """Return (model, optimizer, how it runs, in words). FP32 weights, whatever the arithmetic."""
    with torch.device(place):
        model = Cipher(cfg)
    how = choose_branch(model, place, number)
    if compile:
        how += "; " + try_compile(model, place, number)
    torch.manual_seed(seed)                         # after trying, which draws random numbers
    model.init_weights()
    return model, torch.optim.AdamW(parameter_groups(model, weight_decay), lr=lr, betas=(0.9, 0.95), fused=True), how


def main():
    if os.environ.get("RANK", "0") != "0":          # of several processes the first one speaks
        sys.stdout = open(os.devnull, "w")
    settings = config.override(globals())
    check_settings()
    if "RANK" in os.environ:
        if preflight:
            raise UserError("--preflight=True tries one process: start it with python, not with torchrun")
        choose_gpu()
    try:
        run(settings)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
            raise UserError(f"batch_size={batch_size} sequences of {seq_len} tokens do not fit into the memory of {device} - " + (
                f"--batch_size={batch_size // 2} --grad_accum={grad_accum * 2} trains the same with less" if batch_size > 1 else
                "set --checkpoint_moe=True, or a smaller model") + "; a run with checkpoints goes on from the newest") from None
        if dist.is_initialized() and "onnection" in str(error):
            raise UserError("another process of this run has ended: look for its error, or for what killed it; the run goes on from its newest checkpoint when started again") from None
        raise
    if dist.is_initialized():
        gc.collect()                                # DDP first: were its reference the group's last, the end could hang (pytorch#56297)
        dist.destroy_process_group()


def run(settings: dict) -> None:
    cfg = architecture(settings)
    out = Path(out_dir)
    place, number, said = pick_device(device, dtype)
    flops = flops_per_token(cfg)
    peak = peak_flops(place)
    if benchmark:
        model, optimizer, how = build(cfg, place, number)
        print(f"{said}; {how}")
        return print_benchmark(model, optimizer, place, number, flops, peak)
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if grad_accum % world:
        raise UserError(f"grad_accum={grad_accum} must be a multiple of the {world} processes, which share the micro-steps - "
                        f"set --grad_accum={math.ceil(grad_accum / world) * world}")
    local_accum = grad_accum // world

    # only rank 0 touches out_dir: on several machines the others need not see it
    finished, kept = share(finished_before(out) if rank == 0 else None)
    if finished:
        print(f"{out}: this run is finished. Next: python sample.py --out_dir={out}" + (
            f". To train longer, copy {kept} and its .sha256 into a new folder and set --out_dir and a larger --max_tokens (and --max_hours, "
            f"which counts the hours before)" if kept else ""))
        return
    if not preflight or place.type == "cuda":
        check_device(place, number, said, flops)

    # data
    train, val = TokenStream(data_dir, "train", seq_len, seed), TokenStream(data_dir, "val", seq_len, 0)
    manifest = train.manifest
    if manifest["vocab_size"] != vocab_size:
        raise UserError(f"vocab_size={vocab_size}, but the data in {data_dir} was made with {manifest['vocab_size']} - "
                        f"set --vocab_size={manifest['vocab_size']}, or run prepare.py with the same config file")
    passes = max_tokens / (train.n_windows * seq_len)
    if passes > max_passes:
        raise UserError(f"max_tokens={max_tokens:,} is {passes:.1f} passes over the {train.n_windows:,} training windows of {seq_len} tokens in {data_dir}, and "
                        f"more than about 4 stop paying - prepare more text, or set --max_tokens={int(max_passes * train.n_windows * seq_len)} "
                        f"or --max_passes={math.ceil(passes)}")
    load_tokenizer(Path(data_dir) / "tokenizer.json", manifest["tokenizer_sha256"])
    hashes = dict(tokenizer_sha256=manifest["tokenizer_sha256"], manifest_sha256=config.sha256_file(Path(data_dir) / "manifest.json"))
    differing = [name for name, digest in share(hashes).items() if hashes[name] != digest]
    if differing:
        raise UserError(f"{data_dir}: another {differing[0].removesuffix('_sha256')} than on the first machine - copy that one's data_dir here")

    # the folder, before anything is built or compiled
    parts = count_parameters(cfg)
    checkpoint_bytes = 12 * parts["total"]          # FP32 weights and two moments
    path = before = None
    if rank == 0:
        held = claim(out, checkpoint_bytes)         # noqa: F841 - until the process ends
        if preflight:
            return rehearse(settings, hashes, out, place, passes, checkpoint_bytes)
        path, before = newest_valid(out)
        if before is not None:
            check_same_run(path, before, settings, hashes)
            if any(before["settings"].get(name) != settings[name] for name in ("max_tokens", "max_hours", "patience")):
                before.update(since_best=0, end=1.0)            # a budget set anew is to be used

    # signals
    stop, started = [], None                        # signals received; a second one of a kind acts at once
    def on_signal(which, frame):
        stop.append(which)
        signal.signal(which, signal.SIG_DFL)
        if started is None:
            print("stopped before the first step of this start: nothing is lost")
            raise SystemExit(0 if world == 1 else 1)            # torchrun waits for the others of one that ends with 0
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK"):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:     # nohup ignores SIGHUP on purpose
            signal.signal(getattr(signal, name), on_signal)

    # the model and its state, all of it in the checkpoint
    model, optimizer, how = build(cfg, place, number)
    if rank > 0:
        torch.manual_seed(seed + rank)              # other dropout than the first, on the same weights
    state = restore(path, before, model, optimizer, place) or fresh_state()
    del before
    net = model                                     # whose gradients are averaged over the ranks, where there are several
    if world > 1:
        warnings.filterwarnings("ignore", "`broadcast_buffers`")            # its successor is not in every version we run on
        net = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    if state["step"]:
        print(f"resumed from {path}: step {state['step']}, {state['tokens']:,} tokens, {state['hours'] * 60:.1f} minutes of training")
    if rank == 0:
        say_preflight(out, settings, hashes)
    best, hours_before = share(read_side_files(out, state["hours"]) if rank == 0 else None)
    metrics_file = out / "metrics.jsonl"
    if rank == 0:
        for leftover in out.glob("step_*.pt*"):     # of a save that was killed: half a file, or a hash without one
            if leftover.is_file() and re.fullmatch(r"step_[0-9]+\.pt(\.sha256)?\.tmp", leftover.name) or (
                    re.fullmatch(r"step_[0-9]+\.pt\.sha256", leftover.name) and not leftover.with_suffix("").exists()):
                leftover.unlink()
        config.write_text(out / "tokenizer.json", (Path(data_dir) / "tokenizer.json").read_text(encoding="utf-8"))
        config.write_text(out / "config.json", json.dumps(settings, indent=1) + "\n")
        trim_metrics(metrics_file, state)
    metrics = open(metrics_file if rank == 0 else os.devnull, "a", encoding="utf-8", newline="\n", buffering=1)
    trackers = open_trackers(out, settings, state) if rank == 0 else []

    tokens_per_step = batch_size * grad_accum * seq_len
    planned_steps = math.ceil(max_tokens / tokens_per_step)
    n_val = min(val.n_windows, eval_tokens // seq_len)
    if compile and n_val > batch_size:
        n_val -= n_val % batch_size                 # a last batch of another shape would be compiled for itself
    print(f"{said}; {how}" + (f"; {world} processes" if world > 1 else ""))
    print(f"model: {parts['total'] / 1e6:.1f}M parameters, {parts['active'] / 1e6:.1f}M active; {flops / 1e6:,.1f} MFLOP per token")
    print(f"step: {batch_size} sequences x {grad_accum} micro-steps x {seq_len} tokens = {tokens_per_step:,} tokens; "
          f"{max_tokens:,} tokens are {planned_steps:,} steps, {passes:.2f} passes over the data"
          + (f", or {max_hours:g} hours" if max_hours else ""))
    print(f"validation: {n_val * seq_len:,} tokens every {eval_interval} steps; checkpoints every {checkpoint_minutes:g} minutes, "
          f"{checkpoint_bytes / 1e9:.2f} GB each, into {out}")

    # clock: rank 0's, so that all ranks decide alike; look() reads it, and whether any rank was told to stop
    started = time.monotonic()
    seconds = saved_at = best_saved_at = noted_at = 0.0         # since started
    stopping, recent, measured_seconds = False, collections.deque(maxlen=9), 0.0      # recent: seconds of the last steps

    def look() -> None:
        nonlocal seconds, stopping, noted_at
        seconds, told = over_ranks(time.monotonic() - started if rank == 0 else 0.0, float(bool(stop)), op="MAX")
        stopping = bool(told)
        if rank == 0 and seconds - noted_at >= CLOCK_SECONDS:
            noted_at = seconds
            try:
                config.write_text(out / "clock.json", json.dumps(dict(hours=clock())) + "\n")
            except OSError:                         # a full disk is reported where it costs something, at the checkpoint
                pass

    def clock() -> float:
        return hours_before + seconds / 3600

    def progress_now() -> float:
        # A forward pass takes less than half of what a step does to a sequence: the guess before the first evaluation. Twice
        # that bounds what was measured, so that a pause in an evaluation, or in one step of many, does not end the run.
        guess = 0.5 * statistics.median(recent) * n_val / (batch_size * grad_accum) if recent else 0.0
        evaluation = min(state["eval_seconds"] or guess, 2 * guess or math.inf)
        reserve = (evaluation + state["save_seconds"]) / 3600
        by_hours = clock() / (max_hours - min(reserve, 0.5 * max_hours)) if max_hours else 0.0
        return max(state["tokens"] / max_tokens, by_hours) / state["end"]

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        """Copy without waiting: from pageable memory the host would wait for all the GPU has still to do."""
        return (tensor.pin_memory() if place.type == "cuda" else tensor).to(place, non_blocking=True)

    def write_metrics(row: dict) -> None:
        """One line of JSON, which knows no NaN: such a figure becomes null."""
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            metrics.write(json.dumps(row) + "\n")
        except OSError as error:
            say(f"warning: a line of {metrics_file} was not written ({error})")
        for tracker in [*trackers]:
            try:
                tracker[1](row)
            except Exception as error:              # looking on must not end a run
                trackers.remove(tracker)
                say(f"warning: {tracker[0]} failed and is left out from here ({error})")

    def close_trackers() -> None:
        while trackers:
            name, _, close = trackers.pop()
            try:
                close()
            except Exception as error:
                say(f"warning: {name} did not close ({error})")

    def val_batches():
        """This rank's share of the validation windows; the ranks stop together."""
        for first in range(0, n_val, world * batch_size):
            look()
            if stopping:
                raise Interrupted
            own = first + rank * batch_size
            if own < n_val:
                yield val.batch(own, min(batch_size, n_val - own))

    def save() -> None:
        """Save at this step, unless it is there; a failure is loud and costs nothing that was there."""
        nonlocal saved_at
        target = out / f"step_{state['step']:08d}.pt"
        state["hours"] = clock()
        with torch.compiler.set_stance("force_eager"):              # its shape would be compiled for itself
            windows = [val.batch(0, min(PROBE_WINDOWS, val.n_windows))] if rank == 0 else []
            state["probe"] = dict(ce=mean_ce(model, windows, autocast(place, number)), windows=PROBE_WINDOWS, dtype=str(number))
        rngs = [rng_state(place)] * world
        if world > 1:
            dist.all_gather_object(rngs, rngs[0])
        failed = ""
        if rank == 0 and not target.is_file():
            try:
                write_checkpoint(target, dict(model=model.state_dict(), optimizer=optimizer.state_dict(), rng=rngs, settings=settings, **state, **hashes))
            except OSError as error:
                failed = str(error)
        failed = share(failed)
        look()
        saved_at = seconds
        if failed:
            say(f"warning: checkpoint {target.name} was NOT saved ({failed}); the run goes on - make room, the next try is in a minute")
            saved_at += 60 - checkpoint_minutes * 60
            return
        if state["last_eval"] == state["step"] and state["val_ce"] < best["val_ce"]:
            best.update(file=target.name, step=state["step"], val_ce=state["val_ce"])
            try:
                if rank == 0:
                    config.write_text(out / "best.json", json.dumps(best) + "\n")
            except OSError as error:
                say(f"warning: best.json was not written ({error})")
        if keep_checkpoints is not None and rank == 0:
            spared = {target.name, best["file"], state["before_cooldown"]}
            for old in list_checkpoints(out)[:-keep_checkpoints]:
                try:
                    if old.name not in spared:
                        old.unlink()
                        Path(f"{old}.sha256").unlink(missing_ok=True)
                except OSError as error:            # on Windows a file that is open elsewhere
                    say(f"warning: {old.name} was not removed ({error})")

    def go_back(why: str) -> None:
        """Take up the newest checkpoint, but past the windows read since: they may be what broke the run. Once per checkpoint."""
        nonlocal state, metrics, went_back_to, skipped
        path, before = newest_valid(out) if rank == 0 else (None, None)
        path = share(path and str(path))
        if path is None or path == went_back_to:
            raise UserError(f"{why}, " + (f"twice behind {path}" if path else "and there is no checkpoint to go back to") +
                            f" - lower --lr (now {lr}) and start again; a run with checkpoints goes on from the newest in {out}")
        state = restore(Path(path), before, model, optimizer, place) | dict(token_offset=state["token_offset"])
        went_back_to, skipped = path, 0
        metrics.close()
        if rank == 0:
            trim_metrics(metrics_file, state)
            close_trackers()
            trackers.extend(open_trackers(out, settings, state))
        metrics = open(metrics.name, "a", encoding="utf-8", newline="\n", buffering=1)
        bar.n = min(state["tokens"], max_tokens)
        say(f"warning: {why}; gone back to {path}, and on with other windows of the data")

    def warn(faults: dict) -> None:
        """Say what was not so when last looked at."""
        nonlocal unwell
        for kind in faults.keys() - unwell:
            say(f"warning: step {state['step']}: {faults[kind]}")
        unwell = faults.keys()

    def forecast(rate: float) -> None:
        """Say what the budget buys at the measured tokens/s, what it costs and whether the disk has room for it."""
        by_tokens = max(0, max_tokens * state["end"] - state["tokens"]) / rate / 3600
        by_clock = max_hours * state["end"] - clock() if max_hours else math.inf
        hours = max(0.0, min(by_tokens, by_clock))
        tokens = state["tokens"] + hours * 3600 * rate
        total = clock() + hours
        say(f"measured: {rate:,.0f} tokens/s; {'max_tokens' if by_tokens <= by_clock else 'max_hours'} ends the run in about "
            + (f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes")
            + f", at {tokens:,.0f} tokens, {tokens / (train.n_windows * seq_len):.2f} passes over the data"
            + (f", for {total * world * gpu_dollars_per_hour:,.2f} dollars in all" if gpu_dollars_per_hour is not None else ""))
        coming = checkpoints_to_come(hours)
        free = shutil.disk_usage(out).free if rank == 0 else math.inf
        if coming * checkpoint_bytes > free:
            say(f"warning: {out} has room for {free // checkpoint_bytes} more checkpoints of {checkpoint_bytes / 1e9:.1f} GB, and about {coming} are to come - "
                f"make room, or start again with --keep_checkpoints={max(1, min(3, free // checkpoint_bytes - 3))}")

    bar = tqdm(total=max_tokens, initial=min(state["tokens"], max_tokens), unit="tok", unit_scale=True, disable=True if rank else None, leave=False)
    def say(text: str) -> None:
        """Print above the bar, if there is one. A closed terminal or pipe must not end the run."""
        try:
            bar.write(text)
        except OSError:
            pass

    say(f"{'step':>7} {'tokens':>12} {'ce':>7} {'z':>7} {'ortho':>7} {'overlap':>7} {'load':>5} {'lr':>8} {'norm':>6} {'tok/s':>9} {'left':>8}")
    look()
    skipped, steps_here, rate_tokens, rate_seconds, went_back_to = 0, 0, 0, 0.0, None
    watched_load, watched_overlap, watched_steps, unwell, losses, spiking = 0, 0, 0, {}, [], False
    progress_before, seconds_before = progress_now(), seconds

    while True:
        # between steps: evaluate, save, stop ------------------------------------------------------------
        progress = progress_now()
        finished, new_best = progress >= 1, False
        if finished and not state["step"]:
            raise UserError(f"max_hours={max_hours}: used up ({clock():.2f} hours, with those of earlier starts in {out / 'clock.json'}) before the first step - raise it, "
                            f"or choose another --out_dir")
        if state["step"] > 0 and (state["step"] % eval_interval == 0 or finished) and state["last_eval"] != state["step"]:
            began = seconds
            try:
                state["val_ce"] = mean_ce(model, val_batches(), autocast(place, number))
                state["last_eval"] = state["step"]
                new_best = state["val_ce"] < best["val_ce"]     # than the best that is saved
                best_so_far = state["val_ce"] < state["best_val_ce"]
                state["best_val_ce"] = min(state["best_val_ce"], state["val_ce"])
                state["since_best"] = 0 if best_so_far else state["since_best"] + 1
                write_metrics(dict(step=state["step"], tokens=state["tokens"], val_ce=state["val_ce"]))
                say(f"{state['step']:>7} {state['tokens']:>12,} validation ce {state['val_ce']:.4f}" + (", the best so far" if best_so_far else ""))
            except Interrupted:
                finished = False                    # the evaluation is done again at resume
            look()
            state["eval_seconds"] = seconds - began
            hold = 1 - cooldown if schedule == "wsd" else 1.0
            if patience is not None and state["since_best"] >= patience and progress < hold:
                state["end"] *= progress / hold     # what is left is the cooldown, or nothing
                progress = progress_now()
                finished = progress >= 1
                say(f"warning: validation ce has not fallen for {state['since_best']} evaluations (best {state['best_val_ce']:.4f}); more of the same text would only be "
                    f"learnt by heart, so {'the cooldown begins now' if schedule == 'wsd' else 'the run ends now'} - prepare more text, or raise dropout; --patience=None trains on")
        cooling = schedule == "wsd" and progress > 1 - cooldown and state["step"] > 0
        entering = cooling and state["before_cooldown"] is None
        state["before_cooldown"] = None if not cooling else state["before_cooldown"] or f"step_{state['step']:08d}.pt"
        due = not skipped and (seconds - saved_at >= checkpoint_minutes * 60 or new_best and seconds - best_saved_at >= BEST_SAVE_SECONDS)
        if state["step"] > 0 and (finished or stopping or entering or due):
            if not torch.stack([tensor.isfinite().all() for tensor in model.state_dict().values()]).all():
                go_back(f"step {state['step']}: the weights are not finite")
                continue
            began = seconds
            save()
            state["save_seconds"] = seconds - began
            best_saved_at = seconds if new_best else best_saved_at
        if finished or stopping:
            break
        began = seconds
        step_lr, step_bias_rate = schedule_factors(state["step"], planned_steps, progress)
        for group in optimizer.param_groups:
            group["lr"] = step_lr
        logging = (state["step"] + 1) % log_interval == 0 or state["step"] == 0

        # ================================ the step ================================
        sums, load = torch.zeros(4, device=place), 0
        window = state["token_offset"] // seq_len
        for micro in range(local_accum):
            inputs, targets = (to_device(t) for t in train.batch(window + (micro * world + rank) * batch_size, batch_size))
            if world > 1:
                net.require_backward_grad_sync = micro == local_accum - 1       # DDP's switch: one exchange a step
            with autocast(place, number):
                result = net(inputs, targets)
            (total_loss(result) / local_accum).backward()
            sums += torch.stack([result[name].detach() for name in ("ce", "z", "ortho", "overlap")]) / grad_accum
            load = load + result["load"]
        if world > 1:
            dist.all_reduce(load)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip, foreach=True).item()   # the step's one host read
        if math.isfinite(grad_norm):
            optimizer.step()
            model.update_bias(load, step_bias_rate)
        optimizer.zero_grad(set_to_none=True)
        # ==========================================================================

        look()
        steps_here += 1
        state["step"] += 1
        state["tokens"] += tokens_per_step
        state["token_offset"] += tokens_per_step
        if steps_here > 1:                          # the first of a start may compile
            recent.append(seconds - began)
        rate_tokens, rate_seconds = rate_tokens + tokens_per_step, rate_seconds + seconds - began
        measured_seconds += seconds - began if 1 < steps_here <= 1 + MEASURED_STEPS else 0.0       # the first step of a start is slow
        if steps_here == 1 + MEASURED_STEPS:
            forecast(MEASURED_STEPS * tokens_per_step / max(1e-9, measured_seconds))
        bar.update(min(tokens_per_step, max(0, max_tokens - bar.n)))
        if state["step"] > warmup_steps and n_routed and rank == 0:
            watched_load, watched_overlap, watched_steps = watched_load + load, watched_overlap + sums[3] * world, watched_steps + 1
            if watched_steps == HEALTH_STEPS:
                warn(routing_faults(watched_load, watched_overlap.item() / HEALTH_STEPS))
                watched_load = watched_overlap = watched_steps = 0
        if logging:
            if world > 1:
                dist.all_reduce(sums)
            ce, z, ortho, overlap = sums.tolist()
            share_of_load = load.float() / load.sum(-1, keepdim=True).clamp(min=1)                              # [L, P, E]
            entropy = -torch.xlogy(share_of_load, share_of_load).sum(-1).mean(1) / math.log(max(2, n_routed))   # [L], 1 = even
            largest = share_of_load.flatten(1).amax(1).tolist() if n_routed else []                             # [L]
            spiking, was_spiking = is_spike(ce, losses), spiking
            if spiking and not was_spiking:
                say(f"warning: loss spike: ce {ce:.2f} at step {state['step']}, {statistics.median(losses):.2f} before - if it stays, stop, delete the checkpoints behind the spike "
                    f"and start again with a lower --lr (now {lr})")
            losses = [*losses[-29:], ce]
            speed = rate_tokens / max(1e-9, rate_seconds)          # a coarse clock may stand still
            done = progress_now()
            left = (seconds - seconds_before) / 3600 * max(0, 1 - done) / max(1e-9, done - progress_before)
            write_metrics(dict(
                step=state["step"], tokens=state["tokens"], ce=ce, z=z, ortho=ortho, overlap=overlap, lr=step_lr,
                bias_update_rate=step_bias_rate, grad_norm=grad_norm, tokens_per_s=round(speed, 1), mfu=speed * flops / peak / world if peak else None,
                max_load_share=largest, load_entropy=entropy.tolist() if n_routed else [],
                load=[[[round(x, 4) for x in shares] for shares in populations] for populations in share_of_load.tolist()], hours=clock(),
                memory_gib=peak_memory_gib(place)))
            say(f"{state['step']:>7} {state['tokens']:>12,} {ce:>7.4f} {z:>7.3f} {ortho:>7.4f} {overlap:>7.3f} {max(largest, default=0):>5.2f} "
                f"{step_lr:>8.1e} {grad_norm:>6.2f} {speed:>9,.0f} {left * 60:>6.1f} m")
            rate_tokens, rate_seconds = 0, 0.0
        if not math.isfinite(grad_norm):
            skipped += 1
            say(f"warning: step {state['step']}: the gradient is not finite; the step was skipped ({skipped} in a row)")
            if skipped == SKIPS_IN_A_ROW:
                go_back(f"{skipped} steps in a row had a non-finite gradient")
        else:
            skipped = 0

    with contextlib.suppress(OSError):              # a full disk: said below, of the checkpoint
        metrics.close()
    close_trackers()
    bar.close()
    last = out / f"step_{state['step']:08d}.pt"
    again = "the same torchrun command" if world > 1 else config.command("train.py")
    if rank == 0 and state["step"] > 0 and not last.is_file():
        raise UserError(f"{out}: the last checkpoint could not be saved - make room there and start again: {again}")
    if not finished:
        print(f"stopped at step {state['step']}, {progress:.0%} of the budget; {'saved' if state['step'] else 'nothing to save yet'}. Start again to go on: {again}")
        return
    summary = dict(step=state["step"], tokens=state["tokens"], hours=state["hours"], val_ce=state["val_ce"], best=best,
                   before_cooldown=state["before_cooldown"])
    if rank == 0:
        config.write_text(out / "done.json", json.dumps(summary, indent=1) + "\n")
    print(f"finished: {state['step']} steps, {state['tokens']:,} tokens in {state['hours'] * 60:.1f} minutes"
          + (f" for {state['hours'] * world * gpu_dollars_per_hour:,.2f} dollars" if gpu_dollars_per_hour is not None else "") + f"; validation ce {state['val_ce']:.4f} nats "
          f"per token, best {best['val_ce']:.4f} ({best['file']})")
    if schedule == "wsd" and state["tokens"] < max_tokens * state["end"] and optimizer.param_groups[0]["lr"] > min_lr + 0.5 * (lr - min_lr):
        print("warning: the clock ran out before the cooldown, in a pause or a slow evaluation: the weights are those of a high learning rate - "
              "remove done.json and start again with a larger --max_hours")
    print(f"next: {config.command('sample.py')}    and    {config.command('evaluate.py')}")


if __name__ == "__main__":
    config.run(main)
