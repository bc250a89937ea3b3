#!/usr/bin/env python3
"""Makes small tokenizers in the forms that models have them, and the reference libraries' ids.

    python3 tests/golden/formats/make_tokenizers.py

Needs tiktoken 0.14.0, mistral-common 1.13.1 and sentencepiece 0.2.3. Trained on the texts below; the folders hold the tokenizer's file, and
expected.json with, for each text: `ids`, `ids_special` (with what the library adds to a text) and `decoded`.
"""

import base64
import collections
import json
import random
import shutil
from pathlib import Path

import regex
import sentencepiece
import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

OUT = Path(__file__).parent / "tokenizers"
KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = """
The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's asleep. We'll see what they've done; I'd say nothing.
Der Fuchs springt über den faulen Hund, größer als zuvor. Le renard brun saute par-dessus le chien paresseux où il dort déjà.
Быстрая коричневая лиса прыгает через ленивую собаку. 敏捷的棕色狐狸跳过了懒狗,今天天气很好,我们去公园散步吧。 素早い茶色の狐がのろまな犬を飛び越える。
빠른 갈색 여우가 게으른 개를 뛰어넘는다. الثعلب البني السريع يقفز فوق الكلب الكسول. हर इंसान को आज़ाद होना चाहिए। Η γρήγορη αλεπού.
fn main() { let numbers: Vec<u32> = (0..10).map(|x| x * 2).collect(); println!("{:?}", numbers); }
def encode(text: str) -> list[int]:\n    return [ranks[piece] for piece in split(text)]\n\nclass Machine:\n    pass
<div class="a"><p>HTML</p></div> https://example.org/a?b=c&d=1 user@example.org 3.14159 1,000,000 2026-11-23 0xFF 100% $5 #tag
"""


def texts() -> list:
    """Multilingual text, code, numbers, white space and random bytes."""
    rng = random.Random(7)
    found = [line for line in WORDS.split("\n") if line] + [
        "", " ", "  ", "a", " a", "a ", "\n", "\n\n  \n", "\t\tx\r\n\r\ny", "a  b   c", " lead", "trail ", "1234567", "don't DON'T 'S",
        "你好，世界！Hello世界hello", "가나다 ABC abc", "naïve café — “quoted” … ½ ② Ⅷ", "👩‍👩‍👧‍👦🇩🇪 emoji 🙂", "e\u0301 \u00e9 \ufb01 \u3000 \u00a0x",
        "x" * 50, "ab" * 30, " " * 20 + "indented", "snake_case camelCase SCREAMING_CASE", "\u0000\u0001\u007f", "ǅ ǈ Ǆemo ʰʷ",
    ]  # fmt: skip
    for size in (3, 17, 60, 200):
        found.append(bytes(rng.randrange(256) for _ in range(size)).decode("utf-8", "replace"))
    for size in (5, 40, 120):
        found.append("".join(chr(rng.choice([rng.randrange(32, 0x250), rng.randrange(0x400, 0x3100), rng.randrange(0x4E00, 0x9FFF)]))
                             for _ in range(size)))  # fmt: skip
        found.append("".join(rng.choice("aeiou nst\n.,'") for _ in range(size)))
    return found


def write(folder: Path, name: str, content, encode, encode_special, decode, more=()):
    folder.mkdir(parents=True, exist_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    cases = []
    for text in [*texts(), *more]:
        ids = encode(text)
        cases.append({"text": text, "ids": ids, "ids_special": encode_special(text), "decoded": decode(ids)})
    (folder / "expected.json").write_text(json.dumps(cases, ensure_ascii=False, indent=0) + "\n")
    print(folder.name, sum(len(case["ids"]) for case in cases), "tokens")


def ranks(pattern: str, size: int) -> dict:
    """Byte pairs of the words above: the most frequent neighbours become a token, again and again."""
    # Version 1 of the module's syntax has intersections of sets.
    pieces = [[bytes([byte]) for byte in piece.encode()] for piece in regex.findall(pattern, WORDS, regex.V1)]
    found = {bytes([byte]): byte for byte in range(256)}
    while len(found) < size:
        pairs = collections.Counter(pair for piece in pieces for pair in zip(piece, piece[1:]))
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        found[left + right] = len(found)
        for piece in pieces:
            at = 0
            while at + 1 < len(piece):
                if (piece[at], piece[at + 1]) == (left, right):
                    piece[at : at + 2] = [left + right]
                at += 1
    return found


def kimi():
    found = ranks(KIMI, 600)
    lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in found.items())
    first = len(found)
    named = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 3: ("<think>", False)}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {
        str(first + i): {"content": text, "special": special} for i, (text, special) in named.items()}}  # fmt: skip
    specials = {named[i][0] if i in named else f"<|reserved_token_{first + i}|>": first + i for i in range(256)}
    encoding = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=found, special_tokens=specials)
    folder = OUT / "kimi"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")

    def encode(text):
        return encoding.encode(text, allowed_special="all")

    # Decoded without special tokens, as users see it.
    hidden = {id for text, id in specials.items() if text != "<think>"}
    more = ["[BOS]hello<|im_end|>", "<think>你好</think>", "a<|reserved_token_604|>b"]
    write(folder, "tiktoken.model", lines, encode, encode,
          lambda ids: encoding.decode([id for id in ids if id not in hidden]), more)


def tekken():
    found = ranks(TEKKEN, 560)
    # Special tokens by name, and fewer tokens used than the file has.
    vocabulary = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
                  for token, rank in found.items()]  # fmt: skip
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
             "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>"]  # fmt: skip
    config = {"pattern": TEKKEN, "num_vocab_tokens": len(found), "default_vocab_size": 550 + 20,
              "default_num_special_tokens": 20, "version": "v7"}  # fmt: skip
    specials = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    content = json.dumps({"config": config, "vocab": vocabulary, "special_tokens": specials}, indent=0) + "\n"
    folder = OUT / "tekken"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(content)
    reference = Tekkenizer.from_file(folder / "tekken.json")
    write(folder, "tekken.json", None, lambda text: reference.encode(text, bos=False, eos=False),
          lambda text: reference.encode(text, bos=True, eos=False), lambda ids: reference.decode(ids))


def sentence_piece(name: str, **more):
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in WORDS.split("\n") if line] * 2), model_prefix=str(folder / "tokenizer"),
        model_type="bpe", vocab_size=620, byte_fallback=True, character_coverage=0.98, num_threads=1, minloglevel=2, **more,
    )  # fmt: skip
    (folder / "tokenizer.vocab").unlink()
    reference = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    write(folder, "tokenizer.model", None, reference.encode, lambda text: [1, *reference.encode(text)], reference.decode)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    kimi()
    tekken()
    # As Llama 2's.
    sentence_piece("sentencepiece", normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
                   allow_whitespace_only_pieces=True)
