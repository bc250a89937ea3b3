#!/usr/bin/env python3
"""Makes pre_tokenizers.json: texts, and what llama.cpp makes of them by each `tokenizer.ggml.pre` that we know.

The vocabulary is learned from whole texts, so that its tokens cross nearly every place where an expression may cut.

    python3 tests/golden/gguf/make_tokens.py [--llama-cpp FOLDER]    # with gguf and tokenizers

llama.cpp's expressions do not tell capital letters from small ones outside ASCII, nor composed from decomposed ones.
PUBLISHED has those of the models' tokenizer.json (llama.cpp quotes them); there the ids of the package `tokenizers`
are added where they differ.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import gguf
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from make import build

OUT = Path(__file__).with_name("pre_tokenizers.json")

NAMES = """llama-bpe llama3 llama-v3 falcon3 pixtral lfm2 midm-2.0 dbrx smaug-bpe chatglm-bpe glm4 glm5 qwen2
deepseek-r1-qwen megrez kormo f2llmv2 qwen35 stablelm2 hunyuan solar-open grok-2 tekken kimi-k2 gpt-4o llama4 kanana2
minimax-m2 tiny_aya cohere2moe deepseek-llm deepseek-coder deepseek-v3 hunyuan-dense joyai-llm youtu seed-coder
exaone-moe minicpm5 viking smollm starcoder refact command-r codeshell exaone minerva-7b mellum2 gpt-2 phi-2 gigachat
olmo exaone4 mpt mellum a.x-4.0 jais trillion granite-docling superbpe sarvam-moe gemma4""".split()

# What becomes the vocabulary. Small, so that words repeat.
LEARNED = [
    "The cat sat. It's theirs, isn't it? They'll say we've won; I'm sure he'd agree. THE CAT'S HAT: DON'T, WE'LL!",
    "for (int i = 0; i < 10; i++) {\n    total += values[i];\n}\n\nif x == 42:\n\treturn x // 7\n",
    "1 12 123 1234 12345 123456 1234567 2024-11-27 3.14159 1,000,000 0x1F v1.2.3 10th 4x4 a1b2c3",
    "Straße über Ärger, déjà vu, naïve façade, Ünlü ÉCOLE, CamelCaseWord, iPhone, McDonald's, HTMLParser, ABC def",
    "Привет, мир! Как дела? ПРИВЕТ МИР. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया। สวัสดีชาวโลก",
    "你好，世界！今天天气很好。我有3个苹果。こんにちは、世界。カタカナとひらがな。안녕하세요 세계. 12月31日",
    "🚀 🎉🎉 👩‍👩‍👧 ✅ → ∑ ≤ € £5 ½ ² Ⅷ ①②③ ٣٤٥ १२३",
    "«quotes» “double” ‘single’ – dash — dash… 「かぎ」 《书名》 (a) [b] {c} <d> #tag @name $x %y ^z &and *b* ~t `q` |p| \\n",
    "  two   three    four     five\n\n\n\nnew\r\nline\r\n\r\n\ttab\t\ttabs \n \n  \n x  \n",
    "!!! ??? ... ,,, ;; :: -- == != <= >= && || ++ /* c */ // c\n/path/to/file.txt https://a.b/c?d=e#f",
]

TEXTS = LEARNED + [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "a ", " a", "a  b", "a\n\nb", "a \n b", "a\t\tb  ",
    "x  \n\n  y", "don't DON'T 'S 's 'sun 'LLama I'Ve we'RE", "'tis ’s ’ll it’s", "zebra quux  zebra quuxes", "1", "12345678901",
    "a1 1a 12ab34", "3個 4 ½ months ٣٤٥٦٧ १२३४", "ÄÖÜäöü ÄpfelBaum apfelBAUM ĲsselMEER ǅungla", "e\u0301tude E\u0301COLE n\u0303",
    "日本語とEnglishとКириллица mixed", "中文abc中文", "abc中文 def。ghi！jkl？", "カタカナー・ひらがな゛", "한국어 조사는 붙는다 ㅋㅋㅋ ㄱㄴ",
    "ㄅㄆㄇ 、。〈〉 ︰﹏ —— ……", "नमस्ते की मात्रा", "a.b,c;d:e", "foo(bar)[baz]{qux}", "#include <stdio.h>\nint main() { return 0; }\n",
    "!!!\n\n\nhello...\n", "?!/\n/a\r\n/", "a / b // c /\n", "$100 €5 £3 +1 -1 =", "\u00a0nbsp\u3000wide\u2003em\u200bzero", "🚀rocket 🎉 👍🏽x",
    "a_b __init__ snake_case CONST_X", "e.g. i.e., U.S.A.", "tab\there\n\tindent\n\t\tmore", "word\u0300\u0301 x\u0302", "Ⅷ ² ① x² 10⁶",
]  # fmt: skip

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def but_han(letters: str) -> str:
    return f"{letters[:-1]}&&[^\\p{{Han}}]]"


def cases(end: str, digits: str) -> str:
    """Words are cut where a capital letter follows a small one."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (rf"{start}{UPPER}*{LOWER}+{end}|{start}{UPPER}+{LOWER}*{end}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}")


QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"
QWEN35 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{REST}"
# From the code next to its files (tokenization_kimi.py).
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{but_han(UPPER)}*{but_han(LOWER)}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{but_han(UPPER)}+{but_han(LOWER)}*{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"
)
# By name: the expressions, and whether texts are composed (NFC) first.
PUBLISHED = {
    "tekken": ([cases("", r"\p{N}")], False),
    **dict.fromkeys(["gpt-4o", "llama4", "kanana2", "minimax-m2"], ([cases(f"{CONTRACTIONS}?", r"\p{N}{1,3}")], False)),
    **dict.fromkeys(["tiny_aya", "cohere2moe"], ([r"\d{1,3}(?=(?:\d{3})*\b)", cases(f"{CONTRACTIONS}?", r"\p{N}{1,3}")], False)),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "megrez", "f2llmv2"], ([QWEN2], True)),
    "qwen35": ([QWEN35], True),
    "youtu": (
        [
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            cases(f"{CONTRACTIONS}?", r"\p{N}"),
        ],
        False,
    ),
    "superbpe": ([r"\p{N}+", r"(?=(\d{3})+(?!\d))"], False),
    "kimi-k2": ([KIMI], False),
}  # fmt: skip
WHOLE_FIRST = {"tekken", "youtu", "kimi-k2"}
# Tokens that no merges lead to.
UNREACHED = ["zebra", "Ġzebra", "Ġquux"]


def vocabulary(whole: bool):
    """Tokens by id and merges, of bytes or (`whole`) of characters with "▁" for spaces."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=whole))
    if whole:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        # As in Gemma's vocabulary, no token has a line break and another character.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
        special = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        special = []
    trainer = trainers.BpeTrainer(
        vocab_size=1100, min_frequency=1, show_progress=False, special_tokens=special, max_token_length=12,
        initial_alphabet=[] if whole else pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(LEARNED * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get) + UNREACHED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return tokens, merges


def write(path: Path, pre: str, tokens: list, merges: list, bytes_from: int | None):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = [6 if token.startswith("<0x") and bytes_from is not None else 1 for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_library(pre: str, tokens: list, merges: list) -> list:
    expressions, composed = PUBLISHED[pre]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre in WHOLE_FIRST))
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, default=Path.home() / ".cache/thunderhead/llama.cpp")
    args = parser.parse_args()
    plain, whole = vocabulary(False), vocabulary(True)
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = build(args.llama_cpp, folder, "tokens.cpp")
        (folder / "texts").write_bytes(b"".join(b"\0" + text.encode() for text in TEXTS))
        for pre in NAMES:
            of_whole = pre in ("sarvam-moe", "gemma4")
            tokens, merges = whole if of_whole else plain
            write(folder / "v.gguf", pre, tokens, merges, 0 if of_whole else None)
            run = subprocess.run([program, folder / "v.gguf", folder / "texts"], check=True, capture_output=True, text=True)
            ids = [[int(id) for id in line.split()] for line in run.stdout.split("\n")[: len(TEXTS)]]
            assert len(ids) == len(TEXTS), pre
            entry = {"ids": ids}
            if of_whole:
                entry["whole"] = True
            if pre in PUBLISHED:
                library = by_library(pre, tokens, merges)
                differ = {str(at): ids_ for at, ids_ in enumerate(library) if ids_ != ids[at]}
                entry["published"] = differ
                print(f"{pre}: llama.cpp differs from the published expression in {sorted(map(int, differ))}")
            same = next((other for other in found if {k: v for k, v in other.items() if k != "names"} == entry), None)
            if same:
                same["names"].append(pre)
            else:
                found.append({"names": [pre], **entry})
    vocabularies = [{"tokens": tokens, "merges": merges} for tokens, merges in (plain, whole)]
    compact = lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    lines = [f'"vocabulary":{compact(vocabularies[0])}', f'"whole":{compact(vocabularies[1])}', f'"texts":{compact(TEXTS)}']
    groups = ",\n".join(compact(entry) for entry in found)
    OUT.write_text("{\n" + ",\n".join(lines) + f',\n"groups":[\n{groups}\n]\n}}\n')
    print(f"{len(found)} groups, {OUT.stat().st_size / 1000:.0f} kB")
    for entry in found:
        print(" ".join(entry["names"]))


if __name__ == "__main__":
    main()
