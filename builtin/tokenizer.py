"""The built-in model's tokenizer: byte-level BPE, trained on the data and on draws of the augmenter."""

import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import Augmenter, Entry

VOCAB = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}\n"
)


def build(entries: list[Entry], path: Path) -> Tokenizer:
    """Trains and saves tokenizer.json. The same data give the same file."""
    draw = Augmenter(entries, seed=7)
    texts = []
    for e in entries:
        texts += [e.answer] * 4 + e.topics * 2
        texts += [draw.fill(text, e.lists) for text in e.asked for _ in range(3)]
        texts += [value for values in e.lists.values() for value in values] if e.out_of_scope else []
    texts += [text for _ in range(12000) for role, text, _ in draw.dialogue() if role != "assistant"]
    texts += ["user\n", "assistant\n", "system\n"] * 100
    random.Random(7).shuffle(texts)
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, min_frequency=2, special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    if tok.get_vocab_size() != VOCAB:
        raise ValueError(f"the data give {tok.get_vocab_size()} tokens, but {VOCAB} are wanted")
    tok.save(str(path))
    return tok


class Encoder:
    """Dialogues to token ids. With `dropout`, users' words are sometimes cut in unusual places (BPE dropout)."""

    def __init__(self, path: Path, dropout: float = 0.0):
        self.exact = Tokenizer.from_file(str(path))
        self.loose = None
        if dropout:
            self.loose = Tokenizer.from_file(str(path))
            self.loose.model.dropout = dropout
        self.start = self.exact.token_to_id("<|im_start|>")
        self.end = self.exact.token_to_id("<|im_end|>")
        self.newline = self.ids("\n")

    def ids(self, text: str) -> list[int]:
        return self.exact.encode(text, add_special_tokens=False).ids

    def turn(self, role: str, text: str, loose: bool = False) -> list[int]:
        words = self.loose.encode(text, add_special_tokens=False).ids if loose and self.loose else self.ids(text)
        return [self.start, *self.ids(role + "\n"), *words, self.end, *self.newline]

    def opening(self) -> list[int]:
        return [self.start, *self.ids("assistant\n")]
