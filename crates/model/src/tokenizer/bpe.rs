//! Byte-pair encoding in compact tables. The library's tables hold every token three times: with
//! 128,000 tokens they take more memory than a rank of a small model may use beyond its weights,
//! and building them takes as long as loading the weights. The library still provides normalizers,
//! splitting, added tokens and other kinds of models.

mod read;

use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};

use ahash::RandomState;
use hashbrown::HashTable;
use serde::{Serialize, Serializer};
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
    merges: Rule,
    /// Tokens that never result from text, and that may have the text of another token, by id.
    specials: Vec<(u32, String)>,
    /// Tokens of the 256 bytes, for characters without a token; if empty, such characters vanish.
    bytes: Vec<u32>,
    /// A text that equals a token becomes that token, regardless of the merges.
    whole_first: bool,
}

/// Which neighbours become one token.
enum Rule {
    /// Those in a list.
    Listed(Merges),
    /// Any two whose joined text is a token; the lowest id first (tiktoken).
    Joined,
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
    /// Where its text begins.
    start: u32,
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
        let mut at = 0;
        let mut add = |id, len| {
            let index = symbols.len() as u32;
            symbols.push(Symbol { id, start: at, len, previous: index.wrapping_sub(1), next: index + 1 });
            at += len;
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

    /// The rank and the result of a merge of neighbours in `text`.
    fn merged(&self, text: &str, left: &Symbol, right: &Symbol) -> Option<(u32, u32)> {
        match &self.merges {
            Rule::Listed(merges) => merges.get(left.id, right.id),
            Rule::Joined => {
                let both = text.get(left.start as usize..(right.start + right.len) as usize)?;
                self.vocabulary.id(both).map(|id| (id, id))
            }
        }
    }

    fn merge(&self, text: &str, symbols: &mut [Symbol]) {
        let candidate = |symbols: &[Symbol], left: u32| -> Option<Candidate> {
            let symbol = symbols.get(left as usize)?;
            let right = symbols.get(symbol.next as usize)?;
            let (rank, both) = self.merged(text, symbol, right)?;
            Some(std::cmp::Reverse((rank, left, both)))
        };
        let mut queue: BinaryHeap<Candidate> =
            (0..symbols.len() as u32).filter_map(|left| candidate(symbols, left)).collect();
        while let Some(std::cmp::Reverse((_, left, both))) = queue.pop() {
            let symbol @ Symbol { start, len, next, previous, .. } = symbols[left as usize];
            let Some(&right) = symbols.get(next as usize) else { continue };
            // Either symbol may have changed since. As in the library, another pair with the same
            // result counts as this one.
            if len == 0 || self.merged(text, &symbol, &right).is_none_or(|(_, now)| now != both) {
                continue;
            }
            symbols[left as usize] =
                Symbol { id: both, start, len: len + right.len, next: right.next, previous };
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
        self.merge(text, &mut symbols);
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
            Self::Bpe(bpe) => {
                let last = bpe.vocabulary.spans.len().checked_sub(1).map(|last| last as u32);
                last.into_iter().chain(bpe.specials.iter().map(|(id, _)| *id)).max()
            }
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
            Self::Bpe(bpe) => {
                let special = bpe.specials.iter().find(|(_, text)| text == token).map(|(id, _)| *id);
                special.or_else(|| bpe.vocabulary.id(token))
            }
            Self::Library(model) => model.token_to_id(token),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            Self::Bpe(bpe) => {
                let special = bpe.specials.binary_search_by_key(&id, |(special, _)| *special).ok();
                special
                    .map(|index| bpe.specials[index].1.as_str())
                    .or_else(|| bpe.vocabulary.text(id))
                    .map(str::to_owned)
            }
            Self::Library(model) => model.id_to_token(id),
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            Self::Bpe(bpe) => {
                let ids = bpe.vocabulary.ids.iter();
                let specials = bpe.specials.iter().map(|(id, text)| (text.clone(), *id));
                ids.filter_map(|id| Some((bpe.vocabulary.text(*id)?.to_owned(), *id)))
                    .chain(specials)
                    .collect()
            }
            Self::Library(model) => model.get_vocab(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            Self::Bpe(bpe) => bpe.vocabulary.ids.len() + bpe.specials.len(),
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

/// Tokens whose ids are also their ranks, as in tiktoken. A piece that is a token becomes that
/// token; in other pieces, the neighbours that form the token with the lowest id are joined first.
pub(crate) struct Ranked {
    /// Ids and texts, as pieces of the pre-tokenizer have them.
    pub tokens: Vec<(u32, String)>,
    /// Ids and texts of tokens that are found before a text is cut.
    pub specials: Vec<(u32, String)>,
}

impl Ranked {
    /// Builds the tables.
    ///
    /// # Errors
    /// When the vocabulary is too large, or ids or texts are there twice.
    pub fn build(self) -> Result<Pairs, String> {
        let mut vocabulary = Vocabulary::default();
        for (id, text) in &self.tokens {
            if vocabulary.text(*id).is_some() || vocabulary.id(text).is_some() || text.is_empty() {
                return Err(format!("token {id}, {text:?}, is empty or there twice"));
            }
            vocabulary.insert(text, *id)?;
        }
        for (index, (id, text)) in self.specials.iter().enumerate() {
            let twice = self.specials[..index].iter().any(|(other, same)| other == id || same == text);
            if twice || vocabulary.text(*id).is_some() {
                return Err(format!("special token {id}, {text:?}, is there twice"));
            }
            if *id > super::MAX_TOKEN_ID {
                return Err(super::too_large(*id));
            }
        }
        let (merges, mut specials, bytes) = (Rule::Joined, self.specials, Vec::new());
        specials.sort_unstable_by_key(|(id, _)| *id);
        Ok(Pairs::Bpe(Box::new(Bpe { vocabulary, merges, specials, bytes, whole_first: true })))
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
    /// A text that equals a token becomes that token, regardless of the merges.
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
        let (merges, specials) = (Rule::Listed(merges), Vec::new());
        Ok(Pairs::Bpe(Box::new(Bpe { vocabulary, merges, specials, bytes, whole_first: self.whole_first })))
    }
}

/// The library requires this of every model, for writing; see `save`.
impl Serialize for Pairs {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("a tokenizer is only read here"))
    }
}
