"""The byte-level BPE tokenizer: training, gates, loading. prepare.py calls these; every other script loads.

    python tokenizer.py                              the gates' verdicts for the tokenizer in data_dir
    python tokenizer.py --text="def fib(n):"         and how it splits a text

Reads data_dir/tokenizer.json and data_dir/tokenizer_report.json (both written by prepare.py).

Lossless: every valid Unicode string decodes to itself. All 256 bytes are in the alphabet, there is no
normaliser and no prefix space. Digits stand alone, so that numbers are spelt the same way everywhere.
"""
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import config
from config import UserError

# settings
data_dir = "data/cipher"  # where prepare.py put tokenizer.json
text = ""                 # a text to split, for a look

# Ids are given from 0 up in this order, and asked for by name.
# Control tokens are placed by code alone: text that spells one out is encoded as plain characters.
CONTROL = ("<unk>", "<s>", "</s>", "<pad>", "<mask>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<sep>", "<persona>")
# Structure tags are recognised in text: a corpus or a prompt may write them.
STRUCTURE = ("<task>", "<guidelines>", "<check>", "<mind_spock>", "<mind_sheldon>", "<code>", "<execute>", "<observe>",
             "<deliver>")
BYTES = 256
MAX_VOCAB = 65_536        # shards are uint16: the largest id is 65,535
# Unbounded, one line of 80,000 equal letters teaches tokens of 8,192 letters and takes training super-linear.
MAX_TOKEN_LENGTH = 16     # bytes; 16 still holds four levels of indentation in one token

# A word takes its leading blank or punctuation mark along; digits one by one; runs of punctuation; line ends with
# the blanks before them; a run of blanks less its last, which goes to the word behind it. After the split of GPT-4.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

LONG_BLANK = re.compile(r"\s{1000}")
AWKWARD = ["<s></s><task>x</task><unk>", "  \t\n \r\n\r x  y", "1234567 don't \u00e9\u6f22\U0001f600", "a" * 300, "=" * 300, " " * 300]
SURROGATE = re.compile("[\ud800-\udfff]")


# ----------------------------------------------------------------------------------------------------------
# Training
# ----------------------------------------------------------------------------------------------------------

def check_vocab_size(vocab_size: int) -> None:
    """Raise UserError for a vocabulary that cannot hold the fixed tokens or does not fit into uint16 ids."""
    least = len(CONTROL) + len(STRUCTURE) + BYTES
    if not least < vocab_size <= MAX_VOCAB:
        raise UserError(f"vocab_size={vocab_size} must be from {least + 1} (fixed tokens and bytes) to {MAX_VOCAB} (ids are uint16)")


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> Tokenizer:
    """Train on texts, write path (tokenizer.json) and return it loaded. The same texts give the same file.

    Raises UserError where the texts hold too few different words for vocab_size.
    """
    check_vocab_size(vocab_size)
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*CONTROL, *STRUCTURE], max_token_length=MAX_TOKEN_LENGTH,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    found = tok.get_vocab_size()
    if found < vocab_size:
        least = BYTES + len(CONTROL) + len(STRUCTURE)
        fits = found // 64 * 64 if found // 64 * 64 > least else found          # a multiple of 64 suits the hardware
        raise UserError(f"vocab_size={vocab_size}: the corpus is too small for it, {found - least} merges were found - " +
                        (f"--vocab_size={fits} would do, or prepare more text" if fits > least else "prepare more text"))
    # The trainer marks everything in special_tokens special; only the saved file can say otherwise.
    saved = json.loads(tok.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    config.write_text(path, json.dumps(saved, ensure_ascii=False, indent=1))
    return load_tokenizer(path)


# ----------------------------------------------------------------------------------------------------------
# Loading, encoding, decoding
# ----------------------------------------------------------------------------------------------------------

def load_tokenizer(path: str | Path, sha256: str | None = None) -> Tokenizer:
    """Load tokenizer.json; with sha256 given, refuse any other file than the one the data or model was made with."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no tokenizer here - run python prepare.py first, or set data_dir")
    if sha256 is not None and config.sha256_file(path) != sha256:
        raise UserError(f"{path}: not the tokenizer this data or checkpoint was made with (its SHA-256 differs from "
                        f"{sha256[:12]}...) - use the tokenizer.json that belongs to it, or run prepare.py again")
    try:
        tok = Tokenizer.from_str(path.read_text(encoding="utf-8"))     # from_file fails on odd paths in a C locale
    except Exception as error:                      # the library raises bare Exception for every fault
        raise UserError(f"{path}: not a tokenizer file ({error}) - run prepare.py again with --overwrite=True") from None
    for i, name in enumerate((*CONTROL, *STRUCTURE)):
        if tok.token_to_id(name) != i:
            raise UserError(f"{path}: {name} has id {tok.token_to_id(name)}, not {i} - this is not a tokenizer of Cipher")
    tok.encode_special_tokens = True                # lost by every save and copy; keeps control tokens out of text
    return tok


def clean(text: str) -> str:
    """Replace lone surrogates, which no UTF-8 can hold, by U+FFFD; any other text is returned as it is."""
    return SURROGATE.sub("\ufffd", text)


def encode(tok: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text; a control token spelt out in it becomes plain characters."""
    return tok.encode(clean(text), add_special_tokens=False).ids


def batch_encoder(tok: Tokenizer, sample: list[str]) -> tuple[Callable[[list[str]], list[np.ndarray]], str]:
    """Return (a function from texts to arrays of ids, the name of the library that does the work).

    tiktoken, given the same vocabulary, encodes 8 times as fast per core. It is taken where it is installed and gives the
    ids of tokenizers for the sample: it joins any two tokens that form a third, tokenizers only those it joined in training.
    """
    def slow(texts: list[str]) -> list[np.ndarray]:
        return [np.array(encoding.ids, np.uint32) for encoding in tok.encode_batch_fast(texts, add_special_tokens=False)]

    def fast(texts: list[str]) -> list[np.ndarray]:
        return [fast_one(text) for text in texts]

    def fast_one(text: str) -> np.ndarray:
        if not LONG_BLANK.search(text):             # its regex engine overflows on those
            try:
                return encoding.encode_to_numpy(text, allowed_special=tags, disallowed_special=())
            except BaseException as error:          # a panic of Rust is no Exception
                if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                    raise
        return slow([text])[0]

    try:
        import tiktoken
        special, tags = {tag: tok.token_to_id(tag) for tag in STRUCTURE}, frozenset(STRUCTURE)
        ranks = {b: i for i, b in enumerate(token_bytes(tok)) if b and i not in special.values()}
        encoding = tiktoken.Encoding("cipher", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=special)
        if all(np.array_equal(a, b) for a, b in zip(fast([*sample, *AWKWARD]), slow([*sample, *AWKWARD]), strict=True)):
            return fast, "tiktoken"
    except (ImportError, ValueError, AttributeError):       # not there, too old, or a vocabulary it does not take
        pass
    return slow, "tokenizers"


def decode(tok: Tokenizer, ids: list[int]) -> str:
    """Return the text of ids, control tokens by name. Raises ValueError for an id outside the vocabulary."""
    if any(not 0 <= i < tok.get_vocab_size() for i in ids):
        raise ValueError(f"id outside the vocabulary of {tok.get_vocab_size()}: {[i for i in ids if not 0 <= i < tok.get_vocab_size()][:5]}")
    return tok.decode(ids, skip_special_tokens=False)


def token_bytes(tok: Tokenizer) -> list[bytes]:
    """Return the bytes each id stands for: of learned tokens their text's, of control tokens none.

    The trained file spells bytes as printable characters: those that print stand for themselves, the others
    follow from U+0100 on in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(BYTES) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
    tokens = [tok.id_to_token(i) for i in range(tok.get_vocab_size())]
    return [b"" if t in CONTROL else t.encode() if t in STRUCTURE else bytes(byte_of[c] for c in t) for t in tokens]


# ----------------------------------------------------------------------------------------------------------
# Gates
# ----------------------------------------------------------------------------------------------------------

def gates(tok: Tokenizer, vocab_size: int, stats: dict) -> list[dict]:
    """Judge a tokenizer on the corpus it was made for: a list of {gate, value, bar, passed}.

    stats: text_bytes, text_tokens, used (different ids seen in text); of a sample: sampled (documents), sampled_tokens,
    sampled_words (split at white space), failed (round trips). The bars are set where a healthy tokenizer of this kind never comes near them.
    """
    fixed = [*CONTROL, *STRUCTURE]
    per_token = stats["text_bytes"] / max(1, stats["text_tokens"])
    fertility = stats["sampled_tokens"] / max(1, stats["sampled_words"])
    learnt = vocab_size - len(fixed)
    used = stats["used"] / learnt
    rows = [
        ("vocabulary size", tok.get_vocab_size(), f"= {vocab_size}", tok.get_vocab_size() == vocab_size),
        ("specials at their ids", sum(tok.token_to_id(t) == i for i, t in enumerate(fixed)), f"= {len(fixed)}",
         all(tok.token_to_id(t) == i for i, t in enumerate(fixed))),
        (f"round trips failed, of {stats['sampled']}", stats["failed"], "= 0", stats["failed"] == 0 < stats["sampled"]),
        ("bytes per token", round(per_token, 3), "> 2.5", per_token > 2.5),
        ("tokens per word (fertility)", round(fertility, 3), "< 5", fertility < 5),
        ("share of vocabulary used", round(used, 3), "> 0.8", used > 0.8),
    ]
    return [dict(gate=gate, value=value, bar=bar, passed=bool(passed)) for gate, value, bar, passed in rows]


def print_gates(rows: list[dict]) -> None:
    for row in rows:
        print(f"  {row['gate']:<32} {row['value']:>10}   {row['bar']:<9} {'pass' if row['passed'] else 'FAIL'}")


def main():
    config.override(globals())
    tok = load_tokenizer(Path(data_dir) / "tokenizer.json")
    report = Path(data_dir) / "tokenizer_report.json"
    if report.is_file():
        print_gates(json.loads(report.read_text(encoding="utf-8"))["gates"])
    if text:
        ids = encode(tok, text)
        print(f"{len(text.encode('utf-8', 'replace'))} bytes, {len(ids)} tokens:", " ".join(f"{i}:{decode(tok, [i])!r}" for i in ids))


if __name__ == "__main__":
    config.run(main)
