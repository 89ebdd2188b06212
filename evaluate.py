"""Is it any good? A scorecard of a trained checkpoint, with a bar, a verdict and a remedy for each check.

    python evaluate.py                                  the newest run below out/, its best checkpoint
    python evaluate.py config/local_cpu.py --strict=True     exit code 1 if a check fails
    python evaluate.py --compare=out/other              a second checkpoint beside the first
    python evaluate.py --run_code=True                  also run the Python it writes (read the warning in the README)
    python evaluate.py --verify=out/cipher              are the downloaded checkpoints whole? exit code 1 if not
    python evaluate.py --plot=True                      a picture of the training, from metrics.jsonl alone

Reads the checkpoint and the shards it was trained on (data_dir, or the folder it names); writes scorecard.json beside the checkpoint.
Losses are in nats per token; perplexity is exp of that; bits per byte compare models with other tokenizers.
Bars are the plan's where it has them, else they come from the validation text itself or from chance; each says which.
"""
import ast
import json
import lzma
import math
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import config
import curate
from config import UserError
from model import POPULATIONS, KVCache, P, Watch, autocast, choose_branch, find_checkpoint, list_checkpoints, load_checkpoint, mean_ce, pick_device, read_checkpoint
from prepare import TokenStream, read_manifest
from tokenizer import encode, load_tokenizer, token_bytes

# settings
data_dir = "data/cipher"
out_dir = "out/cipher"
checkpoint: str | None = None     # a file or a run's folder; None = the run's best, else its newest
compare: str | None = None        # a second file or folder, judged beside the first
device = "auto"
dtype = "auto"
batch_size = 16                   # sequences at a time
eval_tokens = 500_000             # of the validation split, the windows training used
samples = 4                       # programs written for each of the code prompts
run_code = False                  # True: also run them, each in a process of its own with limits
strict = False                    # True: exit code 1 if a check fails
verify: str | None = None         # a checkpoint or a folder of them: check that they are whole, and no more
plot = False                      # True: draw out_dir/metrics.jsonl into metrics.png, and no more

TRAIN_TOKENS = 50_000_000         # of the training split at most, for token frequencies and copies
TWIN_TOKENS = 50_000              # of the validation windows, for the checks of the twins
SPAN = 32                         # tokens in a row that count as copied


# ----------------------------------------------------------------------------------------------------------
# Checks: each returns rows (check, value, bar, passed or None, remedy)
# ----------------------------------------------------------------------------------------------------------

def not_finite(model) -> list[str]:
    """Names of the weights and biases that hold a NaN or an infinity."""
    return [name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]


def check_weights(model) -> list:
    broken = not_finite(model)
    return [("weights not finite", len(broken), "= 0", not broken, f"first: {broken[0]} - take an earlier checkpoint" if broken else "")]


def find_data(settings: dict) -> str:
    """data_dir, or the checkpoint's own folder where that alone holds the very data of training, or was made with its tokenizer."""
    fitting = []
    for folder in (data_dir, settings["data_dir"]):
        try:
            if read_manifest(folder)["tokenizer_sha256"] == settings["tokenizer_sha256"]:
                fitting.append(folder)
        except UserError:
            continue
    same = [folder for folder in fitting if config.sha256_file(Path(folder) / "manifest.json") == settings["manifest_sha256"]]
    return (same or fitting or [data_dir])[0]        # data_dir's own error is the one to show


def check_tokenizer(settings: dict, file: Path, manifest: dict) -> list:
    """The checkpoint, the manifest and the file beside the checkpoint must name one tokenizer; the data's was checked at loading."""
    hashes = {settings["tokenizer_sha256"], manifest["tokenizer_sha256"]}
    if (beside := file.parent / "tokenizer.json").is_file():
        hashes.add(config.sha256_file(beside))
    return [("different tokenizers in use", len(hashes), "= 1", len(hashes) == 1, "evaluate with the data the checkpoint was trained on")]


def unigram_ce(train: TokenStream, targets: torch.Tensor, vocab_size: int) -> float:
    """Cross-entropy in nats per token of token frequencies counted on the training split (add-one smoothing)."""
    counts = np.ones(vocab_size)
    for start in range(0, min(train.n_tokens, TRAIN_TOKENS), 1 << 22):
        counts += np.bincount(train.tokens(start, min(train.n_tokens, start + (1 << 22))).numpy(), minlength=vocab_size)
    return float(-np.log(counts / counts.sum())[targets.numpy()].mean())


def check_loss(model, train, windows, context, bytes_of: list[bytes], targets) -> list:
    """ce, and bits per byte against those of token frequencies, gzip and xz on the same bytes.

    bytes_of: of every token; targets [n]: of all windows. The compressors see the text as one piece and have read nothing before.
    """
    ce, text = mean_ce(model, windows(), context), b"".join(bytes_of[i] for i in targets.tolist())
    per_byte = targets.numel() / len(text) / math.log(2)                             # nats per token -> bits per byte
    base, bits, rows = unigram_ce(train, targets, len(bytes_of)) * per_byte, ce * per_byte, []
    for name, size in (("gzip -9", len(zlib.compress(text, 9))), ("xz", len(lzma.compress(text, preset=6)))):
        packed = 8 * size / len(text)
        rows.append((f"  {name} of the same text, bits per byte", packed, "above ours", bits < packed, "a compressor that has read nothing knows more: train longer"))
    return [("validation ce, nats per token", ce, f"< ln V = {math.log(len(bytes_of)):.2f}", ce < math.log(len(bytes_of)), "train longer"),
            ("perplexity = exp(ce)", math.exp(ce), "", None, ""),
            ("bits per byte", bits, f"< {0.75 * base:.3f}", bits < 0.75 * base,
             f"the bar is 25 % below the {base:.3f} of token frequencies alone: train longer, or look at the data"), *rows]


@torch.no_grad()
def check_routing(model, windows, context) -> list:
    """Loads over the validation windows, the worst layer of each figure; bars from the plan where uniform allows them."""
    E, load = model.config.n_routed, 0
    for inputs, _ in windows():
        with context:
            load = load + model(inputs.to(model.rope.device))["load"]
    share = load.double() / load.sum(-1, keepdim=True)                               # [L, P, E]
    entropy = -torch.xlogy(share, share).sum(-1) / math.log(max(2, E))               # [L, P]
    print(f"\n  {'layer':<6}" + "".join(f"{name + ' load shares, largest / smallest / entropy':<56}" for name in POPULATIONS))
    for layer in range(len(share)):
        print(f"  {layer:<6}" + "".join(f"{share[layer, p].max():>12.3f} /{share[layer, p].min():>7.4f} /{entropy[layer, p]:>6.3f}{'':<26}" for p in range(P)))
    worst = share.flatten(1).amax(1).argmax().item()
    dead, largest = int((load == 0).sum()), share.max().item()
    applies = 2.5 / E <= 0.20                        # with fewer experts 0.20 would forbid what 2.5 times the mean allows
    return [("largest load share", largest, "< 0.2" if applies else f"none: even is {1 / E:.3f}",
             largest < 0.20 if applies else None, f"in layer {worst} - raise bias_update_rate, or train longer before the cooldown"),
            ("largest load / mean load", E * largest, "< 2.5", E * largest < 2.5, f"in layer {worst} - raise bias_update_rate"),
            ("dead experts", dead, "= 0", dead == 0, "raise bias_update_rate; with little data use fewer experts"),
            ("load entropy, least layer (1 = even)", entropy.min().item(), "> 0.9", entropy.min().item() > 0.9, "raise bias_update_rate")]


def mutual_information(a: torch.Tensor, b: torch.Tensor, n_a: int, n_b: int) -> float:
    """Bits that a tells of b, from pairs of int64 ids [n] below n_a and n_b."""
    joint = torch.bincount(a * n_b + b, minlength=n_a * n_b).view(n_a, n_b).double() / len(a)
    return (torch.xlogy(joint, joint).sum() - torch.xlogy(joint, joint.sum(1, keepdim=True) * joint.sum(0)).sum()).item() / math.log(2)


@torch.no_grad()
def check_twins(model, windows, context, source_of) -> list:
    """Are the populations two? Their outputs, choices, weight and word in the answer, each beside what chance would give.

    source_of(windows' number) -> int64 ids of the source of each token, or None where there is one source alone.
    """
    E, generator = model.config.n_routed, torch.Generator().manual_seed(0)
    cosine, shuffled, together, by_chance, mass, differs, told, told_by_chance = ([] for _ in range(8))
    for number, (inputs, _) in enumerate(windows()):
        inputs = inputs.to(model.rope.device)
        with context, Watch(model) as watch:
            model(inputs)
        order, sources = torch.randperm(inputs.numel(), generator=generator), source_of(number)
        for (selected, gate), y in zip(watch.routes, watch.twins):
            selected, gate, y = selected.cpu(), gate.cpu(), y.cpu()
            cosine.append(F.cosine_similarity(y[:, 0], y[:, 1]).abs().mean().item())
            shuffled.append(F.cosine_similarity(y[:, 0], y[order, 1]).abs().mean().item())
            mass.append(gate[:, 0].sum(-1).mean().item())
            sheldon, spock = selected[:, 0].repeat_interleave(gate.size(-1), 1), selected[:, 1].repeat(1, gate.size(-1)) - E       # all pairs of a token
            together.append(mutual_information(sheldon.flatten(), spock.flatten(), E, E))
            by_chance.append(mutual_information(sheldon.flatten(), spock[order].flatten(), E, E))
            if sources is not None:
                ids, chosen = sources.repeat_interleave(gate.size(-1)), selected[:, 0].flatten()
                told.append(mutual_information(ids, chosen, int(ids.max()) + 1, E))
                told_by_chance.append(mutual_information(sources[order].repeat_interleave(gate.size(-1)), chosen, int(ids.max()) + 1, E))
        with context:
            alone = [model(inputs[:2], all_logits=True, silence=1 - p)["logits"].log_softmax(-1) for p in range(P)]
        middle = torch.logaddexp(*alone) - math.log(2)
        differs.append(sum(F.kl_div(middle, one, reduction="sum", log_target=True).item() for one in alone) / 2 / middle[..., 0].numel())
    mean = lambda values: sum(values) / len(values)
    excess, least, most = mean(together) - mean(by_chance), min(mass), max(mass)
    rows = [("overlap of the populations' outputs", mean(cosine), "< 0.3", mean(cosine) < 0.3, "raise ortho_weight: the populations are merging"),
            ("  of outputs of different tokens", mean(shuffled), "chance", None, ""),
            ("co-activation: bits one choice tells of the other", excess, f"< {math.log2(E) / 2:.2f}, half of log2 E", excess < math.log2(E) / 2,
             "both populations sort tokens alike: more experts or top_k would serve as well"),
            ("Sheldon's share of the gate mass, least layer", least, "> 0.2", least > 0.2, "Spock speaks alone there: raise z_loss_weight, or train longer"),
            ("  most layer", most, "< 0.8", most < 0.8, "Sheldon speaks alone there: raise z_loss_weight, or train longer"),
            ("disagreement on the next token, each alone, nats", mean(differs), "> 0.01", mean(differs) > 0.01,
             "they say the same (Jensen-Shannon divergence): raise ortho_weight, or train longer")]
    if told:
        gain, chance = mean(told), mean(told_by_chance)
        rows.append(("specialisation: bits a choice tells of the source", gain, f"> {2 * chance:.2g}, twice chance", gain > 2 * chance,
                     "the experts treat all sources alike: no fault, but no gain from routing them either"))
    else:
        rows.append(("specialisation by source", 0, "none: one source", None, ""))
    return rows


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
def check_agreement(model, windows) -> list:
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
# Checks of what it writes
# ----------------------------------------------------------------------------------------------------------

GUARD = """
import sys
try:
    import resource
    for what, most in ((resource.RLIMIT_AS, 1 << 30), (resource.RLIMIT_CPU, 5), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(what, (most, most))
except ImportError:
    pass                    # Windows: the time limit alone

def guard(event, args):
    kind = event.partition(".")[0]
    writes = event == "open" and (set(args[1] or "") & set("wax+") or args[2] & 0b11)
    if writes or kind in ("socket", "subprocess", "shutil", "ctypes", "webbrowser", "signal") or kind == "os" and event not in ("os.listdir", "os.scandir"):
        raise PermissionError(event)

program = compile(sys.stdin.buffer.read(), "<generated>", "exec")
sys.addaudithook(guard)
exec(program, {"__name__": "__main__"})
"""


def runs(program: str) -> bool:
    """Tell whether a program ends without an error: 5 seconds, 1 GiB, an empty folder, no files written, no network, no processes.

    The limits stop accidents. They are no prison for a program that means harm.
    """
    with tempfile.TemporaryDirectory() as empty:
        try:
            return subprocess.run([sys.executable, "-I", "-c", GUARD], input=program.encode("utf-8"), cwd=empty, timeout=5,
                                  env={name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ},
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def new_statements(prompt: str, text: str) -> tuple[str, int]:
    """Return the program that prompt and text make, cut at the last full line, and how many statements in it are new; -1 if it does not compile."""
    program = prompt + text[:text.rfind("\n") + 1]
    try:
        compile(program, "<generated>", "exec")
        return program, sum(isinstance(node, ast.stmt) and node.lineno > prompt.count("\n") for node in ast.walk(ast.parse(program)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program, -1


def distinct(sequences: list[list[int]], n: int) -> float:
    """Different n-grams over all n-grams (distinct-n, arXiv 1510.03055)."""
    grams = [tuple(ids[i:i + n]) for ids in sequences for i in range(len(ids) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def repetition(sequences: list[list[int]]) -> float:
    """Share of the 4-grams of a text that stood in it before, mean over texts (rep-4, arXiv 2202.06417)."""
    return sum(1 - distinct([ids], 4) for ids in sequences) / max(1, len(sequences))


def span_hashes(ids: np.ndarray) -> np.ndarray:
    """Return a hash of each SPAN tokens in a row: uint64 [n - SPAN + 1]."""
    ids, hashes = ids.astype(np.uint64), np.zeros(max(0, len(ids) - SPAN + 1), np.uint64)
    for i in range(SPAN):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[i:i + len(hashes)]     # mod 2^64
    return hashes


def copied(groups: list[list[list[int]]], train: TokenStream) -> list[float]:
    """Return for each group of texts (lists of ids) the share of its spans of SPAN tokens that stand in the training text."""
    spans = [np.concatenate([span_hashes(np.array(ids, np.int64)) for ids in texts] or [np.zeros(0, np.uint64)]) for texts in groups]
    wanted = np.unique(np.concatenate(spans))
    found = np.zeros(len(wanted), bool)
    for start in range(0, min(train.n_tokens, TRAIN_TOKENS), 1 << 20):
        there = np.unique(span_hashes(train.tokens(start, min(train.n_tokens, start + (1 << 20) + SPAN - 1)).numpy()))
        found |= np.isin(wanted, there, assume_unique=True)
    return [float(found[np.searchsorted(wanted, some)].mean()) if len(some) else 0.0 for some in spans]


def continued(model, stream: TokenStream, context) -> float:
    """The share of windows whose second SPAN tokens a greedy continuation of the first SPAN gives exactly (arXiv 2202.07646)."""
    inputs, _ = stream.batch(0, min(64, stream.n_windows))
    if inputs.size(1) < 2 * SPAN:
        return 0.0
    inputs = inputs[:, :2 * SPAN].to(model.rope.device)
    with context:
        return (model.generate(inputs[:, :SPAN], SPAN, temperature=0.0) == inputs).all(1).double().mean().item()


def check_writing(model, tok, val, train, context) -> tuple[list, list[str]]:
    """Programs behind curate.CODE_PROMPTS at sample.py's defaults: do they compile, repeat themselves, copy? Returns (rows, programs)."""
    start, stop = tok.token_to_id("<s>"), tok.token_to_id("</s>")
    fitting = [(text, ids) for text in curate.CODE_PROMPTS if len(ids := [start, *encode(tok, text)]) + SPAN <= model.config.seq_len]
    if not fitting:
        return [("Python that compiles", 0, f"none: no prompt fits into {model.config.seq_len} tokens", None, "")], []
    prompts, ids = zip(*(pair for pair in fitting for _ in range(samples)))
    ids = list(ids)
    with context:
        whole = model.generate(ids, 200, temperature=0.8, top_k=50, top_p=0.95, seed=1337, stop_id=stop)
    written = [(out[len(prompt):] + [stop])[:(out[len(prompt):] + [stop]).index(stop)] for prompt, out in zip(ids, whole)]
    programs = [new_statements(prompt, tok.decode(new)) for prompt, new in zip(prompts, written)]
    good = [program for program, n in programs if n >= 3]
    share = len(good) / len(programs)
    rows = [("Python that compiles, 3 or more new statements", share, "> 0.5", share > 0.5, "train longer, or on more Python"),
            ("  compiles, of any length", sum(n >= 0 for _, n in programs) / len(programs), "", None, "")]
    if run_code:
        running = sum(map(runs, good)) / len(programs)
        rows.append(("  and runs to its end", running, "> 0.25", running > 0.25, "train longer, or on more Python"))
    # The same figures for as much validation text: what is natural for this text and these lengths.
    inputs = torch.cat([val.batch(i, 1)[0] for i in range(min(len(written), val.n_windows))]).tolist()
    real = [window[:len(new)] for window, new in zip(inputs * (len(written) // len(inputs) + 1), written)]
    repeats, natural, again = repetition(written), distinct(real, 2), distinct(written, 2)
    own, of_text = copied([written, real], train)
    by_heart, by_chance = continued(model, train, context), continued(model, val, context)
    return rows + [
        ("4-grams that repeat within a text", repeats, f"< {repetition(real) + 0.2:.2f}, text's own + 0.2", repeats < repetition(real) + 0.2,
         "it runs in circles: train longer; at use raise the temperature or repetition_penalty"),
        ("different 2-grams over all texts", again, f"{0.5 * natural:.2f} to {min(1, 1.2 * natural):.2f}, text's own x 0.5 to 1.2", 0.5 * natural < again < 1.2 * natural,
         "too few: it always writes the same; too many: it writes noise - train longer"),
        (f"copied: {SPAN} tokens that stand in training text", own, f"< {of_text + 0.1:.2f}, validation's own + 0.1", own < of_text + 0.1, "it recites: fewer passes, more text, or dropout"),
        ("  training windows it continues word for word", by_heart, f"< {by_chance + 0.1:.2f}, validation's + 0.1", by_heart < by_chance + 0.1, "it knows them by heart: fewer passes, more text, or dropout"),
    ], [program for program, _ in programs]


@torch.no_grad()
def check_cloze(model, tok, context) -> tuple[list, list[str]]:
    """Which word follows? The right one among all answers, and whether the same words top every prompt. Returns (rows, lines to show)."""
    questions = [(prompt, right, [tok.token_to_id("<s>"), *encode(tok, prompt)], encode(tok, " " + right)) for prompt, right in curate.CLOZE]
    width = max(len(answer) for *_, answer in questions)
    questions = [question for question in questions if len(question[2]) + width <= model.config.seq_len]
    if len(questions) < 2:
        return [("cloze", 0, f"none: no prompt fits into {model.config.seq_len} tokens", None, "")], []
    answers = [answer for *_, answer in questions]
    score, tops, shown = np.zeros((len(answers), len(answers))), [], []              # score: nats per token of answer j behind prompt i
    for i, (prompt, right, ids, _) in enumerate(questions):
        rows = torch.tensor([ids + answer + [0] * (width - len(answer)) for answer in answers], device=model.rope.device)
        with context:
            log_p = model(rows[:, :-1], all_logits=True)["logits"][:, len(ids) - 1:].log_softmax(-1)        # [answers, width, V]
        of_answer = log_p.gather(2, rows[:, len(ids):, None])[:, :, 0]
        score[i] = [of_answer[j, :len(answer)].mean().item() for j, answer in enumerate(answers)]
        likeliest = log_p[0, 0].topk(5).indices.tolist()
        tops.append(set(likeliest))
        shown.append(f"{prompt} ... [{right}] {' '.join(repr(tok.decode([i])) for i in likeliest)}")
    score -= score.mean(0)                           # how common a word is must not decide
    rank = float((score < score.diagonal()[:, None]).mean(1).mean() * len(answers) / (len(answers) - 1))
    bar = 0.5 + 2 * 0.29 / math.sqrt(len(answers))   # 0.29: the deviation of a uniform rank
    same = float(np.mean([len(a & b) / len(a | b) for i, a in enumerate(tops) for b in tops[:i]]))
    return [("cloze: answers that the right one beats", rank, f"> {bar:.2f}, chance 0.5 + 2 deviations", rank > bar, "it has learned few facts: more prose in sources, more tokens, a larger model"),
            ("cloze: likeliest 5 words that prompts share", same, "< 0.5", same < 0.5, "the same function words top every prompt: train longer")], shown


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
    except (UserError, OSError) as error:
        return True, "not recomputed: its data is not here" + (f" whole: {error}" if (Path(folder) / "manifest.json").exists() else "")
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
    failed, known = 0, {name for file in files for name in (file.name, f"{file.name}.sha256")}
    print(f"  {'checkpoint':<24} {'hash and load':<14} {'weights':<12} validation ce of the first windows")
    for file in files:
        try:
            whole = read_checkpoint(file, mmap=True)
            model, settings = load_checkpoint(file, place, whole)
            moments = [tensor for own in whole["optimizer"]["state"].values() for tensor in own.values()]
            if len(moments) != 3 * len(list(model.parameters())) or not all(tensor.isfinite().all() for tensor in moments):
                raise UserError(f"{file}: the weights are there, but not the optimizer's state: training cannot go on from it")
        except (UserError, OSError, KeyError, AttributeError) as error:
            failed += 1
            print(f"  {file.name:<24} FAIL: {error if isinstance(error, (UserError, OSError)) else f'{file}: without {error}, training cannot go on from it'}")
            continue
        broken = not_finite(model)
        right, said = check_probe(model, settings, place) if settings["probe"] else (True, "none was noted")
        failed += bool(broken) or not right
        print(f"  {file.name:<24} {'pass':<14} {'FAIL: ' + broken[0] if broken else 'finite':<12} {'' if right else 'FAIL: '}{said}")
    n = len(files)
    if path.is_dir():
        try:
            known |= {json.loads((path / "best.json").read_text(encoding="utf-8"))["file"]}
        except (OSError, ValueError, TypeError, KeyError):
            pass
        strays = {p.name for p in path.iterdir() if p.name.startswith("step_") and not p.name.endswith((".damaged", ".tmp"))} | known
        for name in sorted(strays):
            whole = name.removesuffix(".sha256")
            if not (path / whole).is_file() or whole not in known:
                failed, n = failed + 1, n + 1
                print(f"  {name:<24} FAIL: {'no checkpoint and no hash of one' if whole not in known and not name.endswith('.sha256') else f'{whole} is not here'}")
    print(f"{n - failed} whole, {failed} not" + (" - copy those again with their .sha256" if failed else ""))
    if failed:
        raise SystemExit(1)


def draw_metrics() -> None:
    """Draw metrics.jsonl of a run into metrics.png: loss, learning rate, speed, overlap, and every expert's load over time."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot=True needs a package that is not here: pip install matplotlib") from None
    folder = Path(checkpoint or out_dir)
    source = (folder.parent if folder.is_file() else folder) / "metrics.jsonl"
    if not source.is_file() and checkpoint is None and folder == Path("out/cipher"):         # the newest run, as find_checkpoint has it
        source = max(Path("out").glob("*/metrics.jsonl"), key=lambda p: p.stat().st_mtime, default=source)
    if not source.is_file():
        raise UserError(f"{source}: no such file - give the folder of a run by --out_dir")
    rows = []
    for line in source.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:                          # the line a kill has cut off
            pass
    have = lambda row, *names: isinstance(row, dict) and all(row.get(name) is not None for name in names)
    training, validation = [r for r in rows if have(r, "step", "tokens", "ce", "lr", "tokens_per_s", "overlap", "load", "hours")], [r for r in rows if have(r, "step", "val_ce")]
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
        value += max(1 / (i + 1), min(1, 10 / len(training))) * (r["ce"] - value)
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
    try:
        loads = np.array([r["load"] for r in training], float)                       # [steps, L, P, E], shares
    except ValueError:                              # of different models
        loads = np.zeros(0)
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

def token_sources(val: TokenStream, manifest: dict):
    """Return a function window's first token -> int64 ids [seq_len] of the sources its tokens are from; None where there is one source.

    The validation split holds the sources one after another.
    """
    ends = np.cumsum([source.get("val_tokens", 0) for source in manifest["sources"].values()])
    if len(np.unique(ends[ends > 0])) < 2 or ends[-1] != val.n_tokens:
        return None
    return lambda start: torch.from_numpy(np.searchsorted(ends, np.arange(start, start + val.seq_len), "right"))


def scorecard(file: Path, place: torch.device, number: torch.dtype, said: str) -> tuple[list, dict]:
    """Judge a checkpoint. Returns (rows as of the checks, what else belongs into scorecard.json)."""
    model, settings = load_checkpoint(file, place)
    choose_branch(model, place, number)
    folder = find_data(settings)
    manifest = read_manifest(folder)
    tok = load_tokenizer(Path(folder) / "tokenizer.json", settings["tokenizer_sha256"])
    val, train = (TokenStream(folder, split, model.config.seq_len, 0) for split in ("val", "train"))
    n = min(val.n_windows, max(1, eval_tokens // model.config.seq_len))
    print(f"{file}: step {settings['step']}; {said}; {n * model.config.seq_len:,} validation tokens of {folder}"
          + (f" (what {data_dir} holds is not what it was trained on)" if folder != data_dir and (Path(data_dir) / "manifest.json").exists() else ""))
    starts = [val.windows[val.window_number(i)] for i in range(n)]
    sources = token_sources(val, manifest)

    def windows(share=1.0):
        last = max(1, round(n * share))
        return (val.batch(first, min(batch_size, last - first)) for first in range(0, last, batch_size))

    source_of = lambda batch: sources and torch.cat([sources(start) for start in starts[batch * batch_size:(batch + 1) * batch_size]])
    context = autocast(place, number)
    broken = check_weights(model)
    rows = broken + check_tokenizer(settings, file, manifest)
    details = dict(checkpoint=str(file), step=settings["step"], data=folder, programs=[], cloze=[])
    if broken[0][3]:                                 # with a NaN in it every other figure would be one
        rows += check_loss(model, train, windows, context, token_bytes(tok), val.batch(0, n)[1].flatten())
        if model.config.n_routed:
            rows += check_routing(model, windows, context)
            rows += check_twins(model, lambda: windows(min(1.0, TWIN_TOKENS / (n * model.config.seq_len))), context, source_of)
            rows += check_ablation(model, lambda: windows(0.5), context)
        written, details["programs"] = check_writing(model, tok, val, train, context)
        guessed, details["cloze"] = check_cloze(model, tok, context)
        choose_branch(model, place, torch.float32)
        rows += written + guessed + check_agreement(model, windows)
    return rows, details


def main():
    config.override(globals())
    if plot:
        return draw_metrics()
    if verify is not None:
        return print_verification(pick_device(device, dtype)[0])
    if min(batch_size, eval_tokens, samples) < 1:
        raise UserError(f"batch_size={batch_size}, eval_tokens={eval_tokens} and samples={samples} must be 1 or more")
    place, number, said = pick_device(device, dtype)
    files = [find_checkpoint(checkpoint, out_dir)] + ([find_checkpoint(compare, out_dir)] if compare is not None else [])
    (rows, details), *others = [scorecard(file, place, number, said) for file in files]
    second = {row[0]: row for row in others[0][0]} if others else {}

    figure = lambda value: f"{value:>10}" if isinstance(value, int) else f"{value:>10.4g}"
    verdict = lambda row: "" if row[3] is None else "pass" if row[3] else "FAIL"
    print(f"\n  {'check':<52} {'value':>10}" + (f" {'':<4} {'compared':>10} {'':<4}" if others else "") + f"   {'bar':<36} verdict")
    for row in rows:
        beside = second.get(row[0])
        print(f"  {row[0]:<52} {figure(row[1])}" + (f" {verdict(row):<4} {figure(beside[1]) if beside else '':>10} {verdict(beside) if beside else '':<4}" if others else "")
              + f"   {row[2]:<36} {verdict(row)}{': ' + row[4] if row[3] is False else ''}")
    for title, lines in (("a program it wrote", details["programs"][:1]), ("what it takes to follow", details["cloze"][::4])):
        if lines:
            print(f"\n{title}:", *("  " + line for text in lines for line in text.splitlines()), sep="\n")
    failed = [row[0].strip() for row in rows if row[3] is False]
    print(f"\n{len([r for r in rows if r[3]])} passed, {len(failed)} failed" + (": " + "; ".join(failed) if failed else ""))
    if others and details["data"] != others[0][1]["data"]:
        print(f"  {details['data']} and {others[0][1]['data']} are different texts: compare nothing but bits per byte, and that with care")
    named = lambda rows, details: details | dict(checks=[dict(zip(("check", "value", "bar", "passed", "remedy"), row)) for row in rows])
    config.write_text(files[0].parent / "scorecard.json", json.dumps(named(rows, details) | (dict(compared=named(*others[0])) if others else {}), indent=1) + "\n")
    print(f"written to {files[0].parent / 'scorecard.json'}")
    if failed and strict:
        raise SystemExit(1)


if __name__ == "__main__":
    config.run(main)
