//! Byte-level BPE by ranks alone: two adjacent tokens merge if their bytes together are a token, and the token of the lowest rank
//! is made first.
//!
//! The `tokenizers` library takes a table of merges instead. For Mistral's vocabulary that table has 269,443 rows, and building
//! the library's tokenizer from it takes 600 ms; reading the list of tokens into a hash table takes 20. The ids are equal. The
//! library gets the merges of a token in the order of their left part's rank. That order decides between overlapping pairs that
//! make the same token, and this module uses it as well.
//!
//! The list may come from a file. So the hash is keyed, and no word takes more than n log n steps.

use super::special;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{BuildHasher, RandomState};
use tokenizers::utils::SysRegex;

/// The pattern with which Llama 3 splits text into words. Mistral's models were trained with another pattern. But this one is in
/// the `tokenizer.json` of FLUX.2 [dev], so the image model was trained with it. Unlike Qwen's, it makes up to three digits one
/// word.
pub const PATTERN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The number of single-byte tokens. They are in order, so the rank of a byte is its value.
const BYTES: usize = 256;

/// Limit on the tokens of a list.
const MAX_TOKENS: usize = 1 << 19;

/// A slot of the hash table without a token.
const EMPTY: u32 = u32::MAX;

/// Tokens by rank, each a length byte and then its bytes.
#[derive(Debug, Clone, Copy)]
pub struct RankList<'a>(pub &'a [u8]);

impl<'a> Iterator for RankList<'a> {
    type Item = &'a [u8];

    /// The next token. Omits an incomplete token at the end of the list.
    fn next(&mut self) -> Option<Self::Item> {
        let (&length, rest) = self.0.split_first()?;
        let (token, rest) = rest.split_at_checked(length.into())?;
        self.0 = rest;
        Some(token)
    }
}

/// A vocabulary with Mistral's special tokens, whose ids precede all other ids.
#[derive(Debug)]
pub struct Ranks {
    /// The tokens, each after a length byte.
    list: Vec<u8>,
    /// The positions of the tokens in the list, by rank.
    starts: Vec<u32>,
    /// A hash table with linear probing, half empty. It holds each rank at the hash of its token.
    slots: Vec<u32>,
    hasher: RandomState,
    /// The length of the longest token.
    longest: usize,
    words: SysRegex,
}

impl Ranks {
    /// Reads a list of tokens in the format of [`RankList`].
    pub fn new(list: Vec<u8>) -> tokenizers::Result<Self> {
        let (mut starts, mut longest, mut at) = (Vec::new(), 0, 0);
        let mut tokens = RankList(&list);
        for token in tokens.by_ref() {
            let rank = starts.len();
            if token.is_empty() {
                return Err(format!("its token of rank {rank} is empty").into());
            }
            if rank < BYTES && token != [rank as u8] {
                return Err(format!("its token of rank {rank} is not the byte {rank}").into());
            }
            if rank == MAX_TOKENS {
                return Err(format!("it has more than {MAX_TOKENS} tokens").into());
            }
            longest = longest.max(token.len());
            starts.push(at as u32);
            at += 1 + token.len();
        }
        if !tokens.0.is_empty() {
            return Err(format!("it ends within the token of rank {}", starts.len()).into());
        }
        if starts.len() < BYTES {
            return Err(format!("it has {} tokens, and none for the byte {}", starts.len(), starts.len()).into());
        }
        let slots = vec![EMPTY; 2 * starts.len().next_power_of_two()];
        let (hasher, words) = (RandomState::new(), SysRegex::new(PATTERN)?);
        let mut ranks = Self { list, starts, slots, hasher, longest, words };
        for rank in 0..ranks.starts.len() {
            let slot = ranks.slot(ranks.token(rank));
            if ranks.slots[slot] != EMPTY {
                return Err(format!("its tokens of ranks {} and {rank} are the same", ranks.slots[slot]).into());
            }
            ranks.slots[slot] = rank as u32;
        }
        Ok(ranks)
    }

    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// The bytes of a token.
    fn token(&self, rank: usize) -> &[u8] {
        let start = self.starts[rank] as usize;
        &self.list[start + 1..][..self.list[start].into()]
    }

    /// The slot of this token, or the slot where it belongs.
    fn slot(&self, token: &[u8]) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = self.hasher.hash_one(token) as usize & mask;
        while self.slots[slot] != EMPTY && self.token(self.slots[slot] as usize) != token {
            slot = (slot + 1) & mask;
        }
        slot
    }

    /// The rank of a token, if there is such a token.
    fn rank(&self, token: &[u8]) -> Option<u32> {
        match token {
            [byte] => Some((*byte).into()),
            _ if token.len() > self.longest => None,
            _ => Some(self.slots[self.slot(token)]).filter(|rank| *rank != EMPTY),
        }
    }

    /// The ids of a text. Special tokens are found first. The text between them is split into words separately.
    pub fn ids(&self, text: &str) -> Vec<u32> {
        let (mut ids, mut from, mut at) = (Vec::new(), 0, 0);
        while let Some(found) = text.as_bytes()[at..].iter().position(|byte| special::opens(*byte)) {
            let start = at + found;
            match special::at_start(&text[start..]) {
                Some((id, length)) => {
                    self.add_text(&text[from..start], &mut ids);
                    ids.push(id);
                    (from, at) = (start + length, start + length);
                }
                None => at = start + 1,
            }
        }
        self.add_text(&text[from..], &mut ids);
        ids
    }

    /// Adds the ids of a text without special tokens.
    fn add_text(&self, text: &str, ids: &mut Vec<u32>) {
        let mut end = 0;
        for (start, stop) in self.words.find_iter(text) {
            // The pattern matches all text. If it did not, text between two words would be a word.
            self.add_word(&text.as_bytes()[end..start], ids);
            self.add_word(&text.as_bytes()[start..stop], ids);
            end = stop;
        }
        // The search ends early if it needs too many steps. As in the library, the rest is then one word.
        self.add_word(&text.as_bytes()[end..], ids);
    }

    /// Adds the ids of a word.
    fn add_word(&self, word: &[u8], ids: &mut Vec<u32>) {
        let id = |rank: u32| special::SPECIALS as u32 + rank;
        if word.is_empty() {
            return;
        }
        // A word that is a token is encoded as that token, even if merges would not lead to it.
        if let Some(rank) = self.rank(word) {
            ids.push(id(rank));
            return;
        }
        let mut merge = Merge::new(word);
        for start in 0..word.len() - 1 {
            merge.offer(self, start);
        }
        while let Some(Reverse((rank, left, start, end))) = merge.pairs.pop() {
            merge.apply(self, rank, left, start as usize, end as usize);
        }
        let mut start = 0;
        while start < word.len() {
            ids.push(id(merge.ranks[start]));
            start = merge.ends[start];
        }
    }

    /// The text of ids, without special tokens. Bytes that are not UTF-8 are replaced.
    pub fn text(&self, ids: &[u32]) -> String {
        let ranks = ids.iter().filter_map(|id| (*id as usize).checked_sub(special::SPECIALS)).filter(|rank| *rank < self.len());
        String::from_utf8_lossy(&ranks.flat_map(|rank| self.token(rank)).copied().collect::<Vec<u8>>()).into_owned()
    }
}

/// The tokens of a word during merging. Each is stored at its first byte.
struct Merge<'a> {
    word: &'a [u8],
    ranks: Vec<u32>,
    /// Where a token ends, or 0 if none starts here.
    ends: Vec<usize>,
    /// The start of the previous token.
    before: Vec<usize>,
    /// Pairs that are a token together: its rank, the rank of the left token, and the start and end of the pair. The lowest pair
    /// is merged first. A pair is out of date if one of its tokens has since been merged with another one.
    pairs: BinaryHeap<Reverse<(u32, u32, u32, u32)>>,
}

impl<'a> Merge<'a> {
    fn new(word: &'a [u8]) -> Self {
        Self {
            word,
            ranks: word.iter().map(|byte| (*byte).into()).collect(),
            ends: (1..=word.len()).collect(),
            before: (0..word.len()).map(|start| start.saturating_sub(1)).collect(),
            pairs: BinaryHeap::with_capacity(word.len()),
        }
    }

    /// Adds the pair that starts here, if it is a token.
    fn offer(&mut self, ranks: &Ranks, start: usize) {
        let Some(&end) = self.ends.get(self.ends[start]) else { return };
        if let Some(rank) = ranks.rank(&self.word[start..end]) {
            self.pairs.push(Reverse((rank, self.ranks[start], start as u32, end as u32)));
        }
    }

    /// Merges a pair unless it is out of date, and adds the two pairs that contain the new token.
    fn apply(&mut self, ranks: &Ranks, rank: u32, left: u32, start: usize, end: usize) {
        let middle = self.ends[start];
        // Tokens only grow, so the same left token and the same end mean the same pair.
        if middle == 0 || self.ranks[start] != left || self.ends.get(middle) != Some(&end) {
            return;
        }
        (self.ranks[start], self.ends[start], self.ends[middle]) = (rank, end, 0);
        if let Some(before) = self.before.get_mut(end) {
            *before = start;
        }
        self.offer(ranks, start);
        if start > 0 {
            self.offer(ranks, self.before[start]);
        }
    }
}
