//! Byte-pair encoding in compact tables. The library's tables hold every token three times: with
//! 128,000 tokens they take more memory than a rank of a small model may use beyond its weights,
//! and as long to build as the weights to load. Normalizers, splitting, added tokens and models of
//! other kinds stay the library's.

use std::borrow::Cow;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use ahash::RandomState;
use hashbrown::HashTable;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::{Model, Token};

/// A tokenizer's model: from a piece of the pre-tokenizer to tokens.
pub(crate) enum Pairs {
    /// Byte pairs, in the form that nearly all language models use.
    Bpe(Box<Bpe>),
    /// Anything else.
    Library(Box<ModelWrapper>),
}

/// Byte pairs, without features that no language model uses: dropout, affixes, tokens for unknown
/// text.
pub(crate) struct Bpe {
    vocabulary: Vocabulary,
    merges: Merges,
    /// Tokens of the 256 bytes, for characters without a token; if empty, such characters vanish.
    bytes: Vec<u32>,
    /// A text that equals a token becomes that token, whatever the merges say.
    whole_first: bool,
}

/// Tokens by text and by id.
#[derive(Default)]
struct Vocabulary {
    texts: String,
    /// Start and end of each id's text; empty for unknown ids.
    spans: Vec<(u32, u32)>,
    ids: HashTable<u32>,
    hasher: RandomState,
}

impl Vocabulary {
    fn text(&self, id: u32) -> Option<&str> {
        let &(start, end) = self.spans.get(id as usize).filter(|(start, end)| start < end)?;
        Some(&self.texts[start as usize..end as usize])
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.ids.find(self.hasher.hash_one(text), |id| self.text(*id) == Some(text)).copied()
    }

    fn insert(&mut self, text: &str, id: u32) -> Result<(), String> {
        if id > super::MAX_TOKEN_ID {
            return Err(super::too_large(id));
        }
        let start = self.texts.len() as u32;
        self.texts.push_str(text);
        let end = u32::try_from(self.texts.len()).map_err(|_| "the vocabulary is above 4 GiB".to_owned())?;
        if self.spans.len() <= id as usize {
            self.spans.resize(id as usize + 1, (0, 0));
        }
        self.spans[id as usize] = (start, end);
        let Self { texts, spans, ids, hasher } = self;
        let of = |id: &u32| {
            let (start, end) = spans[*id as usize];
            &texts[start as usize..end as usize]
        };
        match ids.find_mut(hasher.hash_one(text), |other| of(other) == text) {
            Some(known) => *known = id,
            None => {
                ids.insert_unique(hasher.hash_one(text), id, |id| hasher.hash_one(of(id)));
            }
        }
        Ok(())
    }
}

/// Merges of two tokens, by rank.
#[derive(Default)]
struct Merges {
    /// By rank: left, right, both.
    list: Vec<[u32; 3]>,
    ranks: HashTable<u32>,
    hasher: RandomState,
}

impl Merges {
    /// Rank and result.
    fn get(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        let of = |rank: &u32| self.list[*rank as usize];
        let rank =
            self.ranks.find(self.hasher.hash_one([left, right]), |rank| of(rank)[..2] == [left, right])?;
        Some((*rank, of(rank)[2]))
    }

    fn push(&mut self, left: u32, right: u32, both: u32) {
        let rank = self.list.len() as u32;
        self.list.push([left, right, both]);
        let Self { list, ranks, hasher } = self;
        let of = |rank: &u32| [list[*rank as usize][0], list[*rank as usize][1]];
        match ranks.find_mut(hasher.hash_one([left, right]), |rank| of(rank) == [left, right]) {
            // As in the library, the last of equal merges wins.
            Some(known) => *known = rank,
            None => {
                ranks.insert_unique(hasher.hash_one([left, right]), rank, |rank| hasher.hash_one(of(rank)));
            }
        }
    }
}

/// A part of the text that becomes one token, in a linked list.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    /// Bytes of text; 0 after it was merged into the symbol before.
    len: u32,
    previous: u32,
    next: u32,
}

/// No neighbour.
const NONE: u32 = u32::MAX;

/// A possible merge: the lowest rank first, then the leftmost.
type Candidate = std::cmp::Reverse<(u32, u32, u32)>;

impl Bpe {
    fn symbols(&self, text: &str) -> Vec<Symbol> {
        let mut symbols = Vec::with_capacity(text.len());
        let mut add = |id, len| {
            let index = symbols.len() as u32;
            symbols.push(Symbol { id, len, previous: index.wrapping_sub(1), next: index + 1 });
        };
        for (start, c) in text.char_indices() {
            let c = &text[start..start + c.len_utf8()];
            match self.vocabulary.id(c) {
                Some(id) => add(id, c.len() as u32),
                None if self.bytes.is_empty() => {}
                None => c.bytes().for_each(|byte| add(self.bytes[usize::from(byte)], 1)),
            }
        }
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        symbols
    }

    fn merge(&self, symbols: &mut [Symbol]) {
        let candidate = |symbols: &[Symbol], left: u32| -> Option<Candidate> {
            let symbol = symbols.get(left as usize)?;
            let right = symbols.get(symbol.next as usize)?;
            let (rank, both) = self.merges.get(symbol.id, right.id)?;
            Some(std::cmp::Reverse((rank, left, both)))
        };
        let mut queue: BinaryHeap<Candidate> =
            (0..symbols.len() as u32).filter_map(|left| candidate(symbols, left)).collect();
        while let Some(std::cmp::Reverse((_, left, both))) = queue.pop() {
            let Symbol { id, len, next, previous } = symbols[left as usize];
            let Some(&right) = symbols.get(next as usize) else { continue };
            // Either symbol may have changed since. As in the library, another pair with the same
            // result counts as this one.
            if len == 0 || self.merges.get(id, right.id).is_none_or(|(_, now)| now != both) {
                continue;
            }
            symbols[left as usize] = Symbol { id: both, len: len + right.len, next: right.next, previous };
            symbols[next as usize].len = 0;
            if let Some(after) = symbols.get_mut(right.next as usize) {
                after.previous = left;
            }
            queue.extend(candidate(symbols, previous));
            queue.extend(candidate(symbols, left));
        }
    }

    fn tokenize(&self, text: &str) -> Vec<Token> {
        if self.whole_first
            && let Some(id) = self.vocabulary.id(text)
        {
            return vec![Token::new(id, text.to_owned(), (0, text.len()))];
        }
        let mut symbols = self.symbols(text);
        self.merge(&mut symbols);
        let mut start = 0;
        let tokens = symbols.iter().filter(|symbol| symbol.len > 0).map(|symbol| {
            let end = start + symbol.len as usize;
            let offsets = (std::mem::replace(&mut start, end), end);
            Token::new(symbol.id, self.vocabulary.text(symbol.id).unwrap_or_default().to_owned(), offsets)
        });
        tokens.collect()
    }
}

impl Pairs {
    /// The largest id.
    pub fn last_id(&self) -> Option<u32> {
        match self {
            Self::Bpe(bpe) => bpe.vocabulary.spans.len().checked_sub(1).map(|last| last as u32),
            Self::Library(model) => model.get_vocab().into_values().max(),
        }
    }
}

impl Model for Pairs {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        match self {
            Self::Bpe(bpe) => Ok(bpe.tokenize(sequence)),
            Self::Library(model) => model.tokenize(sequence),
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Bpe(bpe) => bpe.vocabulary.id(token),
            Self::Library(model) => model.token_to_id(token),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            Self::Bpe(bpe) => bpe.vocabulary.text(id).map(str::to_owned),
            Self::Library(model) => model.id_to_token(id),
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            Self::Bpe(bpe) => {
                let ids = bpe.vocabulary.ids.iter();
                ids.filter_map(|id| Some((bpe.vocabulary.text(*id)?.to_owned(), *id))).collect()
            }
            Self::Library(model) => model.get_vocab(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            Self::Bpe(bpe) => bpe.vocabulary.ids.len(),
            Self::Library(model) => model.get_vocab_size(),
        }
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        match self {
            Self::Bpe(_) => Err("a tokenizer is only read here".into()),
            Self::Library(model) => model.save(folder, prefix),
        }
    }

    fn get_trainer(&self) -> TrainerWrapper {
        match self {
            Self::Bpe(_) => BpeTrainer::default().into(),
            Self::Library(model) => model.get_trainer(),
        }
    }
}

/// The `model` of a tokenizer.json, its large parts as text.
#[derive(Deserialize)]
struct File<'a> {
    r#type: Option<String>,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    #[serde(borrow)]
    vocab: Option<&'a RawValue>,
    #[serde(borrow)]
    merges: Option<&'a RawValue>,
}

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&RawValue>::deserialize(deserializer)?.get();
        let library = || Ok(Self::Library(serde_json::from_str(text).map_err(D::Error::custom)?));
        let Ok(file) = serde_json::from_str::<File<'de>>(text) else { return library() };
        let (Some("BPE"), Some(vocab), Some(merges)) = (file.r#type.as_deref(), file.vocab, file.merges)
        else {
            return library();
        };
        let affix = |affix: Option<String>| affix.is_some_and(|affix| !affix.is_empty());
        if file.dropout.is_some_and(|p| p != 0.0)
            || affix(file.continuing_subword_prefix)
            || affix(file.end_of_word_suffix)
        {
            return library();
        }
        let Entries(vocabulary) = serde_json::from_str(vocab.get()).map_err(D::Error::custom)?;
        let byte = |byte: u8| vocabulary.id(&format!("<0x{byte:02X}>"));
        let bytes =
            if file.byte_fallback == Some(true) { (0..=255).map_while(byte).collect() } else { Vec::new() };
        // Without a token for every byte, some characters would be unknown.
        if file.unk_token.is_some() && bytes.len() < 256 || !matches!(bytes.len(), 0 | 256) {
            return library();
        }
        let mut deserializer = serde_json::Deserializer::from_str(merges.get());
        let merges = List(&vocabulary).deserialize(&mut deserializer).map_err(D::Error::custom)?;
        let whole_first = file.ignore_merges == Some(true);
        Ok(Self::Bpe(Box::new(Bpe { vocabulary, merges, bytes, whole_first })))
    }
}

/// Byte pairs that do not come from a tokenizer.json.
pub(crate) struct BytePairs<'a> {
    /// By id.
    pub tokens: &'a [&'a str],
    /// Left and right, the first to be applied first.
    pub merges: Vec<(&'a str, &'a str)>,
    /// Characters without a token become the tokens `<0x00>` to `<0xFF>` of their bytes.
    pub byte_fallback: bool,
    /// A text that equals a token becomes that token, whatever the merges say.
    pub whole_first: bool,
}

impl BytePairs<'_> {
    /// Builds the tables.
    ///
    /// # Errors
    /// When the vocabulary is too large, or lacks a token of a merge or of a byte.
    pub fn build(self) -> Result<Pairs, String> {
        let mut vocabulary = Vocabulary::default();
        for (id, text) in self.tokens.iter().enumerate() {
            vocabulary.insert(text, u32::try_from(id).unwrap_or(u32::MAX))?;
        }
        let id = |text: &str| {
            vocabulary.id(text).ok_or_else(|| format!("the vocabulary does not hold the token {text:?}"))
        };
        let bytes = match self.byte_fallback {
            true => (0..=255u8).map(|byte| id(&format!("<0x{byte:02X}>"))).collect::<Result<_, _>>()?,
            false => Vec::new(),
        };
        let mut merges = Merges::default();
        let mut both = String::new();
        for (left, right) in self.merges {
            both.clear();
            both.extend([left, right]);
            merges.push(id(left)?, id(right)?, id(&both)?);
        }
        Ok(Pairs::Bpe(Box::new(Bpe { vocabulary, merges, bytes, whole_first: self.whole_first })))
    }
}

/// The library requires this of every model, for writing; see `save`.
impl Serialize for Pairs {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("a tokenizer is only read here"))
    }
}

/// A string that is borrowed from the file if possible.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// `{"text": id, …}`.
struct Entries(Vocabulary);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tokens to ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut vocabulary = Vocabulary::default();
                while let Some((Text(text), id)) = map.next_entry::<Text<'de>, u32>()? {
                    vocabulary.insert(&text, id).map_err(A::Error::custom)?;
                }
                Ok(Entries(vocabulary))
            }
        }
        deserializer.deserialize_map(Map)
    }
}

/// `[["a", "b"], …]`, or `["a b", …]` in older files.
struct List<'a>(&'a Vocabulary);

impl<'de> DeserializeSeed<'de> for List<'_> {
    type Value = Merges;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Merges, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for List<'_> {
    type Value = Merges;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of merges")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merges, A::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Merge<'a> {
            Pair(#[serde(borrow)] Text<'a>, #[serde(borrow)] Text<'a>),
            Line(#[serde(borrow)] Text<'a>),
        }
        let mut merges = Merges::default();
        let mut both = String::new();
        while let Some(merge) = list.next_element::<Merge<'de>>()? {
            let (left, right) = match &merge {
                Merge::Pair(Text(left), Text(right)) => (&**left, &**right),
                Merge::Line(Text(line)) if line.starts_with("#version") => continue,
                Merge::Line(Text(line)) => line
                    .split_once(' ')
                    .filter(|(_, right)| !right.contains(' '))
                    .ok_or_else(|| A::Error::custom(format!("the merge {line:?} is not two tokens")))?,
            };
            let id = |text: &str| {
                let missing =
                    || A::Error::custom(format!("the merges hold {text:?}, the vocabulary does not"));
                self.0.id(text).ok_or_else(missing)
            };
            both.clear();
            both.extend([left, right]);
            merges.push(id(left)?, id(right)?, id(&both)?);
        }
        Ok(merges)
    }
}
