#!/usr/bin/env python3
"""Makes the tokenizers of `encoders/`, as the published files of BERT and XLM-RoBERTa are made: WordPiece with BERT's normalizer, and Unigram with a character
map of SentencePiece; and texts with their tokens (texts.json). SentencePiece's own tokens must be those of XLM-RoBERTa's file.

    python3 tests/golden/make_encoder_tokenizers.py

Needs tokenizers, sentencepiece and protobuf. README.md says more.
"""

import base64
import io
import json
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent / "encoders"
VOCAB = 163
CORPUS = """A rank holds some heads and channels of every layer, and the ranks of a group add their partial sums.
Embeddings turn a text into a vector; texts about the same thing have vectors that point the same way.
The capital of France is Paris. The capital of Italy is Rome. Cats and dogs are animals that people keep at home.
Rerankers read the query and the document together, and give one score for both. Wie spät ist es? Où est la gare?
Servers answer requests, clients send them, and a scheduler decides which of the waiting texts are computed next."""
TEXTS = [
    "A rank of a group", "The CAPITAL of Fránce?", "unheard-of: 42 texts, 3.14!", "  spaces\tand\nlines  ", "Où est la gare", "日本 café 😀", "", "x",
    "ﬁne ｆｕｌｌ width", "[SEP] </s> [MASK]", "e\u0301 \u200b and\u00a0nbsp",
]
PAIRS = [("capital of France", "Paris is the capital."), ("cats", "Dogs are [SEP] animals </s>"), ("", "empty query"), ("no document", "")]


def bert():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=specials, limit_alphabet=60)
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    ends = [("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]"))]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    tokenizer.enable_truncation(80)
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]", length=80)
    return tokenizer


def xlm_roberta():
    rules = {"\t": " ", "\n": " ", "\u00a0": " ", "\u200b": "", "ﬁ": "fi", "e\u0301": "é", **{chr(0xFEE0 + ord(c)): c for c in "abcdefghijklmnopqrstuvwxyz"}}
    tsv, model = HERE / "rules.tsv", io.BytesIO()
    tsv.write_text("".join("\t".join(" ".join(f"{ord(c):X}" for c in side) for side in rule) + "\n" for rule in rules.items()))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()), model_writer=model, vocab_size=110, normalization_rule_tsv=str(tsv),
        character_coverage=1.0, hard_vocab_limit=True, minloglevel=2,
    )
    tsv.unlink()
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + [(p.piece, p.score) for p in proto.pieces[3:]]
    pieces += [(f"<unused{i}>", -100.0) for i in range(VOCAB - 1 - len(pieces))] + [("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    charsmap = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()}
    squeeze = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    ends = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", ends)
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    written = json.loads(tokenizer.to_str())
    written["normalizer"] = {"type": "Sequence", "normalizers": [charsmap, squeeze]}
    tokenizer = Tokenizer.from_str(json.dumps(written))
    own = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in TEXTS:
        if "</s>" not in text and "\u200b" not in text:
            expected = [0] + [piece + 1 if piece else 3 for piece in own.encode(text)] + [2]
            assert tokenizer.encode(text).ids == expected, (text, tokenizer.encode(text).tokens, own.encode(text, out_type=str))
    return tokenizer


for name, tokenizer in (("bert", bert()), ("xlm-roberta", xlm_roberta())):
    assert tokenizer.get_vocab_size() == VOCAB, tokenizer.get_vocab_size()
    for folder in (name, f"{name}-rerank"):
        tokenizer.save(str(HERE / folder / "tokenizer.json"), pretty=False)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = [{"text": text, "ids": tokenizer.encode(text).ids} for text in TEXTS]
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    pairs = [(pair, plain.encode(*pair)) for pair in PAIRS]
    pairs = [{"pair": pair, "ids": encoded.ids, "types": encoded.type_ids} for pair, encoded in pairs]
    (HERE / name / "texts.json").write_text(json.dumps({"texts": texts, "pairs": pairs}, ensure_ascii=False, indent=1) + "\n")
