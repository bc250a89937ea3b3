//! Finds special tokens in users' texts, so that they are encoded as ordinary text.

use std::collections::HashSet;
use std::ops::Range;

use tokenizers::tokenizer::normalizer::Range as TextRange;
use tokenizers::{
    Model, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
    Token,
};

use super::{Library, Tokenizer, TokenizerError};

/// Beginnings and ends of special tokens: texts that a neighbouring text could complete to one.
#[derive(Debug, Default)]
pub(super) struct SpecialParts {
    beginnings: HashSet<String>,
    ends: HashSet<String>,
    /// Bytes of the longest special token.
    longest: usize,
    /// Characters that special tokens begin with. A text without them has none.
    first: Vec<char>,
    /// A special token may also match characters that the normalizer changes.
    normalized: bool,
}

impl SpecialParts {
    pub(super) fn new(library: &Library) -> Self {
        let mut parts = Self::default();
        let added = library.get_added_vocabulary().get_added_tokens_decoder();
        for token in added.values().filter(|token| token.special) {
            parts.longest = parts.longest.max(token.content.len());
            parts.first.extend(token.content.chars().next());
            parts.normalized |= token.normalized && library.get_normalizer().is_some();
            for (at, _) in token.content.char_indices().skip(1) {
                let (beginning, end) = token.content.split_at(at);
                parts.beginnings.insert(beginning.to_owned());
                parts.ends.insert(end.to_owned());
            }
        }
        parts.first.sort_unstable();
        parts.first.dedup();
        parts
    }

    /// False if `text` contains no special token, which is known without searching for each.
    fn may_be_in(&self, text: &str) -> bool {
        self.normalized || text.contains(self.first.as_slice())
    }

    /// The longest end of `text`, white space aside, that begins a special token.
    fn at_end(&self, text: &str) -> Option<Range<usize>> {
        let end = text.trim_end().len();
        let first = end.saturating_sub(self.longest);
        (first..end)
            .find(|&at| text.is_char_boundary(at) && self.beginnings.contains(&text[at..end]))
            .map(|at| at..end)
    }

    /// The longest beginning of `text`, ignoring white space, that ends a special token.
    fn at_start(&self, text: &str) -> Option<Range<usize>> {
        let start = text.len() - text.trim_start().len();
        let last = text.len().min(start + self.longest);
        (start + 1..=last)
            .rev()
            .find(|&at| text.is_char_boundary(at) && self.ends.contains(&text[start..at]))
            .map(|at| start..at)
    }
}

/// A part of a text: an added token, or text between two of them.
struct Piece {
    range: Range<usize>,
    token: Option<u32>,
}

impl Tokenizer {
    /// Where a user's text would become special tokens, alone or together with the text around it:
    /// whole tokens, and parts of tokens at its ends. In ascending order, without overlaps.
    pub fn special_parts(&self, text: &str) -> Vec<Range<usize>> {
        let is_special = |piece: &Piece| piece.token.is_some_and(|id| self.tokens.is_special(id));
        let mut found = Vec::new();
        if self.specials.may_be_in(text) {
            found.extend(self.pieces(text).into_iter().filter(is_special).map(|piece| piece.range));
        }
        if let Some(start) = self.specials.at_start(text)
            && found.first().is_none_or(|first| start.end <= first.start)
        {
            found.insert(0, start);
        }
        if let Some(end) = self.specials.at_end(text)
            && found.last().is_none_or(|last| last.end <= end.start)
        {
            found.push(end);
        }
        found
    }

    /// Like [`Tokenizer::encode`] for a text with a chat template's tokens, but special tokens are
    /// not recognised in the ranges of `user`, which are ascending. Text there is encoded as
    /// ordinary text.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_around(&self, text: &str, user: &[Range<usize>]) -> Result<Vec<u32>, TokenizerError> {
        let is_user = |range: &Range<usize>| {
            let next = user.partition_point(|user| user.end <= range.start);
            user.get(next).is_some_and(|user| user.start < range.end)
        };
        let forged =
            |piece: &Piece| piece.token.is_some_and(|id| self.tokens.is_special(id)) && is_user(&piece.range);
        if user.is_empty() || !self.pieces(text).iter().any(forged) {
            return self.encode(text, false);
        }
        super::check_white_space(text)?;
        // Added tokens are searched in a copy in which users' parts match none.
        let mut masked = text.as_bytes().to_vec();
        user.iter().for_each(|range| masked[range.clone()].fill(0));
        let masked = String::from_utf8(masked).map_err(|error| TokenizerError::Encode(error.to_string()))?;
        let tokens = self.pieces(&masked).into_iter().filter(|piece| piece.token.is_some());
        let mut pieces = Vec::new();
        let mut done = 0;
        for piece in tokens.chain([Piece { range: text.len()..text.len(), token: None }]) {
            if done < piece.range.start {
                pieces.push(Piece { range: done..piece.range.start, token: None });
            }
            done = piece.range.end;
            pieces.push(piece);
        }
        self.encode_pieces(text, &pieces).map_err(|error| TokenizerError::Encode(error.to_string()))
    }

    /// The text's added tokens, and the texts between them.
    fn pieces(&self, text: &str) -> Vec<Piece> {
        let (added, normalizer) = (self.inner.get_added_vocabulary(), self.inner.get_normalizer());
        added
            .extract_and_normalize(normalizer, text)
            .get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .map(|(_, (start, end), tokens)| {
                let token = tokens.as_ref().and_then(|tokens| tokens.first()).map(|token| token.id);
                Piece { range: start..end, token }
            })
            .collect()
    }

    /// The library's steps after its search for added tokens.
    fn encode_pieces(&self, text: &str, pieces: &[Piece]) -> tokenizers::Result<Vec<u32>> {
        let mut split = PreTokenizedString::from(text);
        split.split(|_, whole: NormalizedString| {
            let part = |piece: &Piece| {
                let part = whole.slice(TextRange::Normalized(piece.range.clone()))?;
                Some((part, piece.token.map(|id| vec![Token::new(id, String::new(), (0, 0))])))
            };
            Ok(pieces.iter().filter_map(part).collect::<Vec<_>>())
        })?;
        if let Some(normalizer) = self.inner.get_normalizer() {
            split.normalize(|part| normalizer.normalize(part))?;
        }
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut split)?;
        }
        split.tokenize(|part| self.inner.get_model().tokenize(part.get()))?;
        Ok(split.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
    }
}
