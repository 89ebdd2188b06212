"""Is it any good? A scorecard of a trained checkpoint, with a bar, a verdict and a remedy for each check.

    python evaluate.py                                  the newest run below out/, its best checkpoint
    python evaluate.py config/local_cpu.py --strict=True     exit code 1 if a check fails
    python evaluate.py --verify=out/cipher              are the downloaded checkpoints whole? exit code 1 if not
    python evaluate.py --plot=True                      a picture of the training, from metrics.jsonl alone

Reads the checkpoint and the shards it was trained on (data_dir, or the folder it names); writes scorecard.json beside the checkpoint.
Losses are in nats per token; perplexity is exp of that; bits per byte compare models with other tokenizers.
"""
import json
import math
from pathlib import Path

import numpy as np
import torch

import config
from config import UserError
from model import POPULATIONS, KVCache, P, autocast, choose_branch, find_checkpoint, list_checkpoints, load_checkpoint, mean_ce, pick_device
from prepare import TokenStream, read_manifest
from tokenizer import load_tokenizer, token_bytes

# settings
data_dir = "data/cipher"
out_dir = "out/cipher"
checkpoint: str | None = None     # a file or a run's folder; None = the run's best, else its newest
device = "auto"
dtype = "auto"
batch_size = 16                   # sequences at a time
eval_tokens = 500_000             # of the validation split, the windows training used
strict = False                    # True: exit code 1 if a check fails
verify: str | None = None         # a checkpoint or a folder of them: check that they are whole, and no more
plot = False                      # True: draw out_dir/metrics.jsonl into metrics.png, and no more

UNIGRAM_TOKENS = 50_000_000       # of the training split, enough to estimate token frequencies


# ----------------------------------------------------------------------------------------------------------
# Checks: each returns rows (check, value, bar, passed or None, remedy)
# ----------------------------------------------------------------------------------------------------------

def not_finite(model) -> list[str]:
    """Names of the weights and biases that hold a NaN or an infinity."""
    return [name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]


def check_weights(model) -> list:
    broken = not_finite(model)
    return [("weights not finite", len(broken), "= 0", not broken,
             f"first: {broken[0]} - take an earlier checkpoint, train on with a lower lr" if broken else "")]


def find_data(settings: dict) -> str:
    """data_dir, or the checkpoint's own where that alone was made with the checkpoint's tokenizer."""
    for folder in (data_dir, settings["data_dir"]):
        try:
            if read_manifest(folder)["tokenizer_sha256"] == settings["tokenizer_sha256"]:
                return folder
        except UserError:
            continue
    return data_dir                                  # its own error is the one to show


def check_tokenizer(settings: dict, file: Path, manifest: dict) -> list:
    """The checkpoint, the manifest and the file beside the checkpoint must name one tokenizer; the data's was checked at loading."""
    hashes = {settings["tokenizer_sha256"], manifest["tokenizer_sha256"]}
    if (beside := file.parent / "tokenizer.json").is_file():
        hashes.add(config.sha256_file(beside))
    return [("different tokenizers in use", len(hashes), "= 1", len(hashes) == 1, "evaluate with the data the checkpoint was trained on")]


def unigram_ce(train: TokenStream, targets: torch.Tensor, vocab_size: int) -> float:
    """Cross-entropy in nats per token of token frequencies counted on the training split (add-one smoothing)."""
    counts = np.ones(vocab_size)
    for start in range(0, min(train.n_tokens, UNIGRAM_TOKENS), 1 << 22):
        counts += np.bincount(train.tokens(start, min(train.n_tokens, start + (1 << 22))).numpy(), minlength=vocab_size)
    return float(-np.log(counts / counts.sum())[targets.numpy()].mean())


def check_loss(model, val, train, windows, context, tok) -> list:
    ce = mean_ce(model, windows(), context)
    targets = torch.cat([t.flatten() for _, t in windows()])
    lengths = np.array([len(b) for b in token_bytes(tok)])
    per_byte = float(targets.numel() / lengths[targets.numpy()].sum() / math.log(2))    # nats per token -> bits per byte
    base = unigram_ce(train, targets, len(lengths)) * per_byte
    return [("validation ce, nats per token", ce, f"< ln V = {math.log(len(lengths)):.2f}", ce < math.log(len(lengths)), "train longer"),
            ("perplexity = exp(ce)", math.exp(ce), "", None, ""),
            ("bits per byte", ce * per_byte, f"< {0.75 * base:.3f}", ce * per_byte < 0.75 * base,
             f"the bar is 25 % below the {base:.3f} of token frequencies alone: train longer, or look at the data")]


@torch.no_grad()
def check_routing(model, windows, context) -> list:
    """Loads over the validation windows, the worst layer of each figure; bars from the plan where uniform allows them."""
    E = model.config.n_routed
    load, overlap, n = 0, 0.0, 0
    for inputs, targets in windows():
        with context:
            result = model(inputs.to(model.rope.device), targets.to(model.rope.device))
        load, overlap, n = load + result["load"], overlap + result["overlap"].item() * len(inputs), n + len(inputs)
    share = load.double() / load.sum(-1, keepdim=True)                               # [L, P, E]
    entropy = -torch.xlogy(share, share).sum(-1) / math.log(max(2, E))               # [L, P]
    print(f"\n  {'layer':<6}" + "".join(f"{name + ' load shares, largest / smallest / entropy':<56}" for name in POPULATIONS))
    for layer in range(len(share)):
        print(f"  {layer:<6}" + "".join(f"{share[layer, p].max():>12.3f} /{share[layer, p].min():>7.4f} /{entropy[layer, p]:>6.3f}{'':<26}" for p in range(P)))
    worst = share.flatten(1).amax(1).argmax().item()
    dead, largest = int((load == 0).sum()), share.max().item()
    applies = 2.5 / E <= 0.20                        # with fewer experts 0.20 would forbid what 2.5 times the mean allows
    return [(f"largest load share (layer {worst})", largest, "< 0.2" if applies else f"none: even is {1 / E:.3f}",
             largest < 0.20 if applies else None, "raise bias_update_rate, or train longer before the cooldown"),
            ("largest load / mean load", E * largest, "< 2.5", E * largest < 2.5, "raise bias_update_rate"),
            ("dead experts", dead, "= 0", dead == 0, "raise bias_update_rate; with little data use fewer experts"),
            ("load entropy, least layer (1 = even)", entropy.min().item(), "> 0.9", entropy.min().item() > 0.9, "raise bias_update_rate"),
            ("overlap of the populations", overlap / n, "< 0.3", overlap / n < 0.3, "raise ortho_weight: the populations are merging")]


def check_ablation(model, windows, context) -> list:
    """What validation ce rises by when a population falls silent, its gates zero, the other's unchanged."""
    whole, rows = mean_ce(model, windows(), context), []
    for p, name in enumerate(POPULATIONS):
        cost = mean_ce(model, windows(), context, silence=p) - whole
        renormalised = mean_ce(model, windows(), context, silence=p, renormalise=True) - whole
        rows += [(f"ce without {name}, rise", cost, "> 0", cost > 0, "this population adds nothing: check routing and overlap"),
                 ("  with the other's gates renormalised", renormalised, "", None, "")]
    return rows


@torch.no_grad()
def check_generation(model, windows) -> list:
    """Generating with a KV cache must give the logits of a full pass, and so the same tokens."""
    inputs = next(iter(windows()))[0][:2, :min(128, model.config.seq_len)].to(model.rope.device)
    full = model(inputs, all_logits=True)["logits"]
    cache = KVCache(model.config, len(inputs), inputs.size(1), inputs.device, torch.float32)
    pieces = [model(inputs[:, a:b], all_logits=True, cache=cache)["logits"]
              for a, b in [(0, inputs.size(1) // 2)] + [(t, t + 1) for t in range(inputs.size(1) // 2, inputs.size(1))]]
    difference = (torch.cat(pieces, 1) - full).abs().max().item()
    different = (torch.cat(pieces, 1).argmax(-1) != full.argmax(-1)).sum().item()
    return [("cached against full logits, largest difference", difference, "< 0.001", difference < 1e-3, "a defect: report it"),
            ("  greedy tokens that differ", different, "= 0", different == 0, "a defect: report it")]


# ----------------------------------------------------------------------------------------------------------
# Verification and picture
# ----------------------------------------------------------------------------------------------------------

def check_probe(model, settings: dict, place: torch.device) -> tuple[bool, str]:
    """Recompute the loss that training noted in the checkpoint, where its data is here. Returns (right, in words)."""
    noted = settings["probe"]
    try:
        folder = find_data(settings)
        if config.sha256_file(Path(folder) / "manifest.json") != settings["manifest_sha256"]:
            return True, f"not recomputed: {folder} holds other data"
        val = TokenStream(folder, "val", model.config.seq_len, 0)
    except (UserError, OSError):
        return True, "not recomputed: its data is not here"
    number = getattr(torch, noted["dtype"].removeprefix("torch."))
    if number == torch.bfloat16 and place.type != "cuda":
        number = torch.float32
    choose_branch(model, place, number)
    ce = mean_ce(model, [val.batch(0, min(noted["windows"], val.n_windows))], autocast(place, number))
    bar = 1e-3 if noted["dtype"] == "torch.float32" else 0.03    # BF16 rounds to 3 digits; measured again in another order or in FP32
    return abs(ce - noted["ce"]) <= bar, f"{ce:.4f}, noted {noted['ce']:.4f}, may differ by {bar}"


def print_verification(place: torch.device) -> None:
    """Hash, strict load, finite weights and the noted loss of each checkpoint; SystemExit(1) if one fails."""
    path = Path(verify)
    files = [path] if path.is_file() else list_checkpoints(path)
    if not files:
        raise UserError(f"{path}: no checkpoint here")
    failed = 0
    print(f"  {'checkpoint':<24} {'hash and load':<14} {'weights':<12} validation ce of the first windows")
    for file in files:
        try:
            model, settings = load_checkpoint(file, place)
        except UserError as error:
            failed += 1
            print(f"  {file.name:<24} FAIL: {error}")
            continue
        broken = not_finite(model)
        right, said = check_probe(model, settings, place) if settings["probe"] else (True, "none was noted")
        failed += bool(broken) or not right
        print(f"  {file.name:<24} {'pass':<14} {'FAIL: ' + broken[0] if broken else 'finite':<12} {'' if right else 'FAIL: '}{said}")
    print(f"{len(files) - failed} whole, {failed} not" + (" - copy those again with their .sha256" if failed else ""))
    if failed:
        raise SystemExit(1)


def draw_metrics() -> None:
    """Draw metrics.jsonl of a run into metrics.png: loss, learning rate, speed, overlap, and every expert's load over time."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot=True needs a package that is not here: pip install matplotlib") from None
    folder = Path(checkpoint or out_dir)
    source = (folder if folder.is_dir() else folder.parent) / "metrics.jsonl"
    if not source.is_file():
        raise UserError(f"{source}: no such file - give the folder of a run by --out_dir")
    rows = []
    for line in source.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:                          # the line a kill has cut off
            pass
    training, validation = [r for r in rows if r.get("ce") is not None], [r for r in rows if r.get("val_ce") is not None]
    if not training:
        raise UserError(f"{source}: no step of training in it yet")
    steps = [r["step"] for r in training]
    figure = Figure(figsize=(15, 9), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "loads"], ["lr", "loads"], ["speed", "loads"], ["overlap", "loads"]], width_ratios=(1, 1.3), height_ratios=(2, 1, 1, 1))
    figure.suptitle(f"{source.parent}: {training[-1]['tokens']:,} tokens in {training[-1]['hours']:.2f} hours, ce {training[-1]['ce']:.3f}"
                    + (f", validation ce {validation[-1]['val_ce']:.3f}" if validation else ""))
    axes["loss"].plot(steps, [r["ce"] for r in training], color="0.75", lw=1, label="training")
    smooth, value = [], training[0]["ce"]
    for i, r in enumerate(training):
        value += max(0.1, 1 / (i + 1)) * (r["ce"] - value)
        smooth.append(value)
    axes["loss"].plot(steps, smooth, color="C0", label="training, smoothed")
    axes["loss"].plot([r["step"] for r in validation], [r["val_ce"] for r in validation], "o-", color="C3", ms=3, label="validation")
    axes["loss"].set(ylabel="ce, nats per token")
    axes["loss"].legend()
    axes["lr"].plot(steps, [r["lr"] for r in training])
    axes["lr"].set(ylabel="learning rate")
    axes["speed"].plot(steps, [r["tokens_per_s"] for r in training])
    axes["speed"].set(ylabel="tokens/s", ylim=(0, None))
    axes["overlap"].plot(steps, [r["overlap"] for r in training])
    axes["overlap"].axhline(0.3, color="C3", ls=":", lw=1)
    axes["overlap"].set(ylabel="overlap", xlabel="step", ylim=(0, max(0.35, *(r["overlap"] for r in training))))
    loads = np.array([r["load"] for r in training], float)                           # [steps, L, P, E], shares
    if loads.size:
        n, L, _, E = loads.shape
        image = axes["loads"].imshow(E * loads.reshape(n, -1).T, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=0, vmax=2, extent=(steps[0], steps[-1] + 1e-9, L * P * E, 0))
        axes["loads"].set_yticks([(i + 0.5) * E for i in range(L * P)], [f"{i // P} {POPULATIONS[i % P]}" for i in range(L * P)])
        axes["loads"].hlines([i * E for i in range(1, L * P)], steps[0], steps[-1] + 1e-9, colors="k", lw=[0.3 + 0.5 * (i % P == 0) for i in range(1, L * P)])
        axes["loads"].set(title="load per expert, by layer and population (1 = even, 0 = dead)", xlabel="step")
        figure.colorbar(image, ax=axes["loads"], extend="max", shrink=0.5)
    else:
        axes["loads"].set_axis_off()                # a dense model
    figure.savefig(source.with_name("metrics.png"), dpi=110)
    print(f"drawn into {source.with_name('metrics.png')}: {len(training)} steps logged, {len(validation)} evaluations")


# ----------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------

def main():
    config.override(globals())
    if plot:
        return draw_metrics()
    if verify is not None:
        return print_verification(pick_device(device, dtype)[0])
    if min(batch_size, eval_tokens) < 1:
        raise UserError(f"batch_size={batch_size} and eval_tokens={eval_tokens} must be 1 or more")
    place, number, said = pick_device(device, dtype)
    file = find_checkpoint(checkpoint, out_dir)
    model, settings = load_checkpoint(file, place)
    choose_branch(model, place, number)
    folder = find_data(settings)
    manifest = read_manifest(folder)
    tok = load_tokenizer(Path(folder) / "tokenizer.json", settings["tokenizer_sha256"])
    val, train = (TokenStream(folder, split, model.config.seq_len, 0) for split in ("val", "train"))
    n = min(val.n_windows, max(1, eval_tokens // model.config.seq_len))
    print(f"{file}: step {settings['step']}; {said}; {n * model.config.seq_len:,} validation tokens of {folder}")

    def windows(share=1.0):
        last = max(1, round(n * share))
        return (val.batch(first, min(batch_size, last - first)) for first in range(0, last, batch_size))

    context = autocast(place, number)
    rows = check_weights(model) + check_tokenizer(settings, file, manifest) + check_loss(model, val, train, windows, context, tok)
    if model.config.n_routed:
        rows += check_routing(model, windows, context) + check_ablation(model, lambda: windows(0.5), context)
    choose_branch(model, place, torch.float32)
    rows += check_generation(model, windows)

    print(f"\n  {'check':<48} {'value':>10}   {'bar':<18} verdict")
    for check, value, bar, passed, remedy in rows:
        shown = f"{value:>10}" if isinstance(value, int) else f"{value:>10.4g}"
        print(f"  {check:<48} {shown}   {bar:<18} {'' if passed is None else 'pass' if passed else 'FAIL: ' + remedy}")
    failed = [row[0].strip() for row in rows if row[3] is False]
    print(f"\n{len([r for r in rows if r[3]])} passed, {len(failed)} failed" + (": " + "; ".join(failed) if failed else ""))
    config.write_text(file.parent / "scorecard.json", json.dumps(dict(
        checkpoint=file.name, step=settings["step"], checks=[dict(zip(("check", "value", "bar", "passed", "remedy"), row)) for row in rows]), indent=1) + "\n")
    print(f"written to {file.parent / 'scorecard.json'}")
    if failed and strict:
        raise SystemExit(1)


if __name__ == "__main__":
    config.run(main)
