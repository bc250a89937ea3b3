//! Texts with the tokens that encoders expect around them: one text, or two with a separator.

use tokenizers::{Encoding, PostProcessor, Token};

use super::{Tokenizer, TokenizerError};

/// Tokens, and the type of each: 0 in the first text, and 1 in the second if the tokenizer
/// distinguishes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypedTokens {
    /// Ids.
    pub ids: Vec<u32>,
    /// Types.
    pub types: Vec<u32>,
}

impl Tokenizer {
    /// A text's tokens, cut at the end so that there are `most` including the post-processor's.
    ///
    /// # Errors
    /// When the library refuses the text.
    pub fn encode_cut(&self, text: &str, most: usize) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = self.encode(text, false)?;
        ids.truncate(most.saturating_sub(self.added_tokens(false)));
        Ok(self.framed(ids, None)?.ids)
    }

    /// Two texts as a reranker reads them. Special tokens in them are ordinary text. The second
    /// text, then the first, is cut at the end so that there are `most` tokens including the
    /// post-processor's.
    ///
    /// # Errors
    /// When the library refuses a text.
    pub fn encode_pair(&self, first: &str, second: &str, most: usize) -> Result<TypedTokens, TokenizerError> {
        let plain = |text: &str| {
            let whole = [0..text.len()];
            self.encode_around(text, if text.is_empty() { &[] } else { &whole })
        };
        let (mut first, mut second) = (plain(first)?, plain(second)?);
        let room = most.saturating_sub(self.added_tokens(true));
        first.truncate(room);
        second.truncate(room - first.len());
        self.framed(first, Some(second))
    }

    /// Tokens that the post-processor adds to a text, or to two.
    fn added_tokens(&self, pair: bool) -> usize {
        self.inner.get_post_processor().map_or(0, |processor| processor.added_tokens(pair))
    }

    fn framed(&self, first: Vec<u32>, second: Option<Vec<u32>>) -> Result<TypedTokens, TokenizerError> {
        let encoding = |ids: Vec<u32>, kind| {
            let tokens = ids.into_iter().map(|id| Token::new(id, String::new(), (0, 0)));
            Encoding::from_tokens(tokens.collect(), kind)
        };
        let second = second.map(|ids| encoding(ids, 1));
        let all = self.inner.post_process(encoding(first, 0), second, true);
        let all = all.map_err(|error| TokenizerError::Encode(error.to_string()))?;
        Ok(TypedTokens { ids: all.get_ids().to_vec(), types: all.get_type_ids().to_vec() })
    }
}
