"""Reads the questions and answers in data/ and makes training dialogues from them.

File format: `@ id` opens an entry; `A:` its answer; `Q:` phrasings to train on, `H:` phrasings held out for evaluation,
`X:` held-out paraphrases that avoid the usual words, `T:` names of its topic, which TOPIC_TEMPLATES expand, `F: parent | ...`
follow-ups that make sense only after the entry `parent` was answered. ` | ` separates phrasings. `L: name = a | b` is a list
that `{name}` stands for in the same file. heldout.txt has further held-out phrasings, as `id: phrasing | phrasing`.
"""

import math
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

from words import NOISE, NOUNS, VERBS

DATA = Path(__file__).parent / "data"

TOPIC_TEMPLATES = [
    "what is {t}", "what is {t}?", "What is {t}?", "what's {t}?", "explain {t}", "Explain {t} to me.",
    "tell me about {t}", "describe {t}", "what do you know about {t}?", "can you explain {t}?", "{t}", "{t}?",
    "I want to know more about {t}", "what does {t} mean?", "give me an explanation of {t}", "how does {t} work?",
]
PREFIXES = [
    "please tell me: ", "can you tell me ", "could you tell me ", "hey, ", "hi, ", "so ", "well, ", "quick question: ",
    "I wonder: ", "I'd like to know: ", "tell me, ", "question: ", "please ", "just curious: ", "um, ", "ok, ", "now ",
    "hello! ", "excuse me, ", "one more thing: ", "sorry, but ", "and ", "do you know ", "maybe you know: ",
]
SUFFIXES = [
    " please", ", please", " thanks", ", thank you", " in thunderhead", " with thunder", " here", " exactly",
    " in short", " briefly", ", any idea?", " I don't get it", " actually", " then", " now",
]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are Thunderhead's assistant.", "Be brief.", "Answer in English.",
    "You are a helpful, respectful and honest assistant.", "You answer questions of users.", "Be kind and precise.",
    "You are an expert for distributed inference.", "Today you help a beginner.", "Answer truthfully.",
    "You are a support agent of a small company. Answer politely and in a few sentences.",
]
HELD_SYSTEM_PROMPTS = ["You are a friendly expert who answers shortly.", "Help the user as well as you can."]

# Words that can replace each other in a question without changing its answer.
SYNONYMS = [
    "machine|computer|node|box|host", "machines|computers|nodes|boxes|hosts", "fast|quick", "faster|quicker",
    "start|launch|begin|bring up", "show|print|display|list", "use|employ|work with", "several|multiple|many|a few",
    "dies|crashes|fails|breaks|goes down|disappears", "explain|describe|clarify", "difference|distinction",
    "need|require|want", "needed|required|necessary", "possible|doable", "big|large|huge", "bigger|larger",
    "small|little|tiny", "choose|pick|select", "chosen|picked|selected", "divide|split|share", "divided|split|shared",
    "measure|benchmark|test", "download|fetch|get|pull", "error|failure|problem|message", "limit|cap|restrict",
    "stop|end|halt", "answer|reply|response", "answers|replies|responses", "text|output", "prompt|question|input",
    "model|network|llm|checkpoint", "models|networks|llms|checkpoints", "weights|parameters|tensors",
    "memory|ram", "graphics card|gpu", "mac|apple computer", "wire|cable|link", "cables|wires|links",
    "speed|pace|rate", "slow|sluggish", "command|subcommand", "flag|option|switch", "set|configure|choose",
    "enable|activate|turn on|switch on", "support|handle|allow", "supported|handled|available|possible",
    "works|functions", "happens|occurs", "why|how come|for what reason", "program|tool|software", "make|create|produce",
    "save|keep|store", "stored|kept|saved", "open|expose", "send|pass|transmit", "together|combined|jointly",
    "company|business|firm|enterprise", "colleagues|coworkers|staff|team", "compare|contrast", "versus|vs|against",
    "better|preferable", "maximum|highest|largest", "between|among", "lost|gone|missing", "broken|interrupted",
    "free|gratis|without cost", "i'd like to|i want to|i would like to", "how do i|how can i|how to|how should i",
    "what is|what's|whats", "can i|may i|could i|is it possible to", "does it|will it|can it", "tell me|say",
    "do i have to|must i|do i need to", "what happens|what does it do|what occurs", "run|execute", "build|compile",
    "each|every", "whole|entire|complete", "token|word", "tokens per second|tok/s|speed", "at once|simultaneously",
    "hello|hi|hey", "thanks|thank you", "server|endpoint|service", "users|people|clients", "part|piece|portion|share",
]


FOREIGN_FRAMES = [
    "what is a {n}", "what is {n}?", "What is the best {n}?", "how do I {v} a {n}", "how to {v} the {n}", "why does the {n} {v}?",
    "who invented the {n}", "explain the {n} {m}", "tell me about {n}", "which {n} should I {v}", "can you {v} a {n}?",
    "do you {v} {n}?", "is {n} healthy", "is {n} better than {m}", "what is the difference between {n} and {m}", "how many {n}s are there",
    "how much does a {n} cost", "how long does it take to {v} a {n}", "where can I buy a {n}?", "when was the {n} invented",
    "what does {n} mean", "what do {n}s eat", "why is the {n} {m}", "how does a {n} work", "should I {v} my {n}", "I want to {v} {n}",
    "does a {n} have a {m}", "my {n} is broken", "my {n} hurts", "{n}", "{n} {m}", "{v} the {n}", "who is the best {n} in the world",
    "what happens when a {n} {v}s", "how do {n}s {v}", "what is a {n} used for", "give me a {n}", "what {n} goes with {m}",
    "how can I {v} without a {n}", "the {n} of the {m}", "are {n}s real?", "did the {n} {v} yesterday?", "what was the {n} {m} about",
    "is it ok to {v}", "is it true that {n}s {v}?", "describe a {n}", "define {n}", "how old is the {n}", "how fast is a {n}",
    "what is the fastest {n}", "can a {n} {v}?", "what should I {v} today", "how do I remove a {n} from a {m}", "what is a {n} in {m}",
    "how do I stop a {n}", "how do I start to {v}", "what are the limits of {n}", "how big is a {n}", "list of {n}s", "which {n}s are there",
]


def tokens(text: str) -> list[str]:
    """Lower-case words of a text."""
    return re.findall(r"[a-z0-9_./-]+", text.lower())


@dataclass
class Entry:
    """One answer with the ways of asking for it."""

    id: str
    answer: str = ""
    asked: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    hard: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    follow: list[tuple[str, str]] = field(default_factory=list)
    lists: dict[str, list[str]] = field(default_factory=dict)

    @property
    def out_of_scope(self) -> bool:
        return self.id.startswith("scope-")


def load() -> list[Entry]:
    """All entries in a fixed order. Raises ValueError where a file breaks the format."""
    entries: list[Entry] = []
    for path in sorted(DATA.glob("*.txt")):
        if path.name == "heldout.txt":
            continue
        lists: dict[str, list[str]] = {}
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            if line.startswith("@ "):
                entries.append(Entry(line[2:].strip(), lists=lists))
                continue
            key, _, rest = line.partition(": ")
            parts = [part.strip() for part in rest.split(" | ")]
            if key == "A":
                entries[-1].answer = rest.strip()
            elif key == "Q":
                entries[-1].asked += parts
            elif key == "H":
                entries[-1].held += parts
            elif key == "X":
                entries[-1].hard += parts
            elif key == "T":
                entries[-1].topics += parts
            elif key == "F":
                entries[-1].follow += [(parts[0], text) for text in parts[1:]]
            elif key == "L":
                name, _, values = rest.partition(" = ")
                lists[name] = [value.strip() for value in values.split(" | ")]
            else:
                raise ValueError(f"{path.name}:{number}: unknown line {line[:40]!r}")
    by_id = {e.id: e for e in entries}
    for line in (DATA / "heldout.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(": ")
            by_id[name].held += rest.split(" | ")
    check(entries)
    return entries


CANONICAL = [(re.compile(r"\b(" + "|".join(map(re.escape, g.split("|")[1:])) + r")\b"), g.split("|")[0]) for g in SYNONYMS]


def plain(text: str) -> str:
    """A text without case, punctuation and polite words, and with one form of each synonym. Two texts are equal after this
    if the augmenter could have made one from the other."""
    text = text.lower()
    for pattern, word in CANONICAL:
        text = pattern.sub(word, text)
    words = re.sub(r"[^a-z0-9 ]", " ", text).split()
    return " ".join(w for w in words if w not in {"please", "so", "hey", "hi", "well", "the", "a", "an"})


def check(entries: list[Entry]) -> None:
    """Refuses duplicate ids and phrasings, thin entries, and held-out phrasings that a template makes from trained ones."""
    trained: dict[str, str] = {}
    ids = {e.id for e in entries}
    for e in entries:
        expanded = e.asked + [t.format(t=topic) for topic in e.topics for t in TOPIC_TEMPLATES]
        for text in expanded:
            if "{" in text:
                continue
            other = trained.setdefault(plain(text), e.id)
            if other != e.id and plain(text):
                raise ValueError(f"{text!r} asks for both {other} and {e.id}")
        if len(e.asked) < 6 or not e.held + e.hard or not e.answer:
            raise ValueError(f"{e.id}: needs an answer, 6 phrasings and one held out")
        for parent, _ in e.follow:
            if parent not in ids:
                raise ValueError(f"{e.id}: follows unknown {parent}")
    if len(ids) != len(entries):
        raise ValueError("an id occurs twice")
    for e in entries:
        for text in e.held + e.hard:
            if plain(text) in trained:
                raise ValueError(f"{e.id}: held-out {text!r} is trained on by {trained[plain(text)]}")


class Augmenter:
    """Draws dialogues: lists of (role, text, entry index or None)."""

    def __init__(self, entries: list[Entry], seed: int):
        self.entries = entries
        self.rng = random.Random(seed)
        self.index = {e.id: i for i, e in enumerate(entries)}
        weight = {"scope-general": 110.0, "scope-task": 26.0, "scope-maths": 14.0, "scope-live": 20.0}
        self.weights = [weight.get(e.id, 1.0 + 0.03 * len(e.asked) + 0.03 * len(e.topics)) for e in entries]
        known = [e for e in entries if not e.out_of_scope]
        seen: dict[str, set[str]] = {}
        for e in known:
            for word in tokens(" ".join(e.asked + e.topics)):
                seen.setdefault(word, set()).add(e.id)
        # How well a word tells the entries apart.
        self.tells = {word: math.log(len(known) / len(ids)) for word, ids in seen.items()}
        self.synonyms = []
        for group in SYNONYMS:
            words = group.split("|")
            pattern = re.compile(r"\b(" + "|".join(map(re.escape, words)) + r")\b", re.IGNORECASE)
            self.synonyms.append((pattern, words))

    def pseudo_word(self) -> str:
        rng = self.rng
        if rng.random() < 0.5:
            # Pieces of two ordinary words: a word that looks real and means nothing.
            first, second = rng.choice(NOUNS), rng.choice(NOUNS + VERBS)
            return first[: rng.randint(2, 4)] + second[-rng.randint(2, 4) :]
        syllable = lambda: rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(["", "", "n", "r", "s", "l", "x"])
        return "".join(syllable() for _ in range(rng.randint(1, 4))) + rng.choice(["", "", "b", "k", "ck", "sh", "t"])

    def drop_words(self, words: list[str]) -> list[str]:
        """Leaves out words, mostly those that say little about the entry."""
        rng = self.rng
        rate = rng.choice([0.1, 0.25, 0.5, 0.9])
        kept = []
        for word in words:
            tells = max((self.tells.get(w, 0.0) for w in tokens(word)), default=0.0)
            if rng.random() > rate * (0.08 if tells > 3.0 else 0.25 if tells > 2.2 else 1.0):
                kept.append(word)
        return kept or words

    def add_noise(self, words: list[str]) -> list[str]:
        """Inserts words that say nothing about the entry."""
        rng = self.rng
        words = list(words)
        for _ in range(rng.choice([1, 1, 2, 3, 5])):
            draw = rng.random()
            word = rng.choice(NOISE) if draw < 0.7 else rng.choice(VERBS) if draw < 0.85 else rng.choice(NOUNS)
            words.insert(rng.randint(0, len(words)), word)
        return words

    def estranged(self) -> str:
        """A question in scope whose telling words are replaced by others."""
        rng = self.rng
        e = rng.choice(self.entries)
        words = []
        for word in (self.fill(rng.choice(e.asked), e.lists)).split():
            if max((self.tells.get(w, 9.0) for w in tokens(word)), default=0.0) < 2.0:
                words.append(word)
            elif rng.random() < 0.8:
                words.append(rng.choice(NOUNS if rng.random() < 0.6 else VERBS) if rng.random() < 0.75 else self.pseudo_word())
        words.insert(rng.randint(0, len(words)), rng.choice(NOUNS))
        return " ".join(words)

    def foreign(self) -> str:
        """A question about something else, in a common frame."""
        rng = self.rng
        n, m, v = rng.choice(NOUNS), rng.choice(NOUNS), rng.choice(VERBS)
        if rng.random() < 0.15:
            n = self.pseudo_word()
        if rng.random() < 0.3:
            return self.estranged()
        frame = rng.choice(FOREIGN_FRAMES)
        if rng.random() < 0.2:
            return " ".join(rng.choice(rng.choice([NOUNS, VERBS, NOISE, NOISE])) for _ in range(rng.randint(2, 7)))
        return frame.format(n=n, m=m, v=v)

    def fill(self, text: str, lists: dict[str, list[str]]) -> str:
        return re.sub(r"\{(\w+)\}", lambda m: self.rng.choice(lists[m.group(1)]), text)

    def raw_question(self, e: Entry) -> str:
        rng = self.rng
        if e.id == "scope-general" and rng.random() < 0.5:
            return self.foreign()
        if e.topics and rng.random() < 0.2:
            return rng.choice(TOPIC_TEMPLATES).format(t=rng.choice(e.topics))
        return self.fill(rng.choice(e.asked), e.lists)

    def typo(self, text: str) -> str:
        rng = self.rng
        spots = [i for i, c in enumerate(text) if c.isalpha()]
        if len(spots) < 6:
            return text
        i = rng.choice(spots[1:])
        kind = rng.random()
        if kind < 0.35:
            return text[:i] + text[i + 1:]
        if kind < 0.65 and i + 1 < len(text):
            return text[:i] + text[i + 1] + text[i] + text[i + 2:]
        if kind < 0.85:
            return text[:i] + text[i] + text[i:]
        return text[:i] + rng.choice("abcdefghijklmnopqrstuvwxyz") + text[i + 1:]

    def vary(self, text: str, strength: float = 1.0) -> str:
        """Another way to type the same question."""
        rng = self.rng
        if rng.random() < 0.2:
            return text
        for pattern, words in self.synonyms:
            if rng.random() < 0.3 * strength:
                text = pattern.sub(lambda m: rng.choice(words), text, count=1)
        words = text.split()
        if len(words) > 2 and strength == 1.0:
            if rng.random() < 0.55:
                words = self.drop_words(words)
            if rng.random() < 0.35:
                words = self.add_noise(words)
            if rng.random() < 0.15:
                i = rng.randrange(len(words))
                words = words[i:] + words[:i]
            elif rng.random() < 0.12:
                rng.shuffle(words)
        text = " ".join(words)
        if rng.random() < 0.2:
            text = rng.choice(PREFIXES) + (text[:1].lower() + text[1:] if rng.random() < 0.7 else text)
        if rng.random() < 0.1:
            text = text.rstrip("?.! ") + rng.choice(SUFFIXES)
        draw = rng.random()
        if draw < 0.35:
            text = text.lower()
        elif draw < 0.5:
            text = text[:1].upper() + text[1:]
        elif draw < 0.51:
            text = text.upper()
        draw = rng.random()
        if draw < 0.3:
            text = text.rstrip("?.! ")
        elif draw < 0.5:
            text = text.rstrip("?.! ") + rng.choice(["?", "?", "?", "??", ".", "!", " ?"])
        for _ in range(2):
            if rng.random() < 0.1:
                text = self.typo(text)
        return text.strip() or "?"

    def question(self, e: Entry) -> str:
        return self.vary(self.raw_question(e), 0.3 if e.out_of_scope else 1.0)

    def dialogue(self) -> list[tuple[str, str, int | None]]:
        rng = self.rng
        turns: list[tuple[str, str, int | None]] = []
        if rng.random() < 0.12:
            turns.append(("system", rng.choice(SYSTEM_PROMPTS), None))
        e = rng.choices(self.entries, self.weights)[0]
        before = rng.choices([0, 1, 2, 3], [0.74, 0.14, 0.08, 0.04])[0]
        asked = [rng.choices(self.entries, self.weights)[0] for _ in range(before)]
        follow_up = None
        if e.follow and rng.random() < 0.25:
            parent, follow_up = rng.choice(e.follow)
            asked = asked[1:] + [self.entries[self.index[parent]]]
        for past in asked:
            turns += [("user", self.question(past), None), ("assistant", past.answer, self.index[past.id])]
        text = self.vary(follow_up, 0.3) if follow_up else self.question(e)
        return turns + [("user", text, None), ("assistant", e.answer, self.index[e.id])]
