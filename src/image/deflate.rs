//! DEFLATE (RFC 1951) for filtered rows of photographs, in parts that are compressed independently.
//!
//! PNG-filtered rows of a photograph hold few repetitions: nearly all that DEFLATE gains comes from Huffman coding. So the
//! matcher probes a hash table once, takes a match only where it is cheaper than its literals, and skips ahead faster the longer
//! it finds nothing. Every part is one block with its own Huffman codes. Flat areas and repeated rows are still found.

use super::huffman::{canonical_codes, code_lengths};

/// The largest distance of a match.
const WINDOW: usize = 32 << 10;

/// The longest match.
const MAX_MATCH: usize = 258;

/// Bits of the hash.
const HASH_BITS: u32 = 13;

/// After every four probes in a row without a match, the step to the next probe grows by one byte.
const PATIENCE: u32 = 2;

/// The largest step between probes.
const MAX_STEP: usize = 64;

/// Estimated bits of the two Huffman codes of a match.
const MATCH_BITS: i32 = 10;

/// The longest code of a literal or a length. One bit less than DEFLATE allows, so that four literals and seven pending bits fit
/// into 64 bits.
const MAX_LITERAL_BITS: usize = 14;

/// The longest code of a distance.
const MAX_DISTANCE_BITS: usize = 15;

/// The symbol that ends a block.
const END: usize = 256;

/// The most bytes of a stored block.
const MAX_STORED: usize = 65_535;

/// The order in which lengths of the code length code are stored.
const LENGTH_ORDER: [usize; 19] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// Literals and then a match; the last token of a part has none.
#[derive(Clone, Copy)]
struct Token {
    literals: u32,
    length: u16,
    distance: u16,
}

/// A possible match, and the estimated number of bits that it saves, in eighths.
struct Match {
    at: usize,
    length: usize,
    distance: usize,
    gain: i32,
}

/// Compresses parts of a stream. The output of a part depends only on its own bytes.
pub(super) struct Deflater {
    /// The latest position of each hash.
    table: Vec<u32>,
    /// The estimated cost of all literals before each position, in eighths of a bit.
    costs: Vec<u32>,
    tokens: Vec<Token>,
}

impl Deflater {
    pub(super) fn new() -> Self {
        Self { table: vec![0; 1 << HASH_BITS], costs: Vec::new(), tokens: Vec::new() }
    }

    /// Appends a part of a stream to `out`. Each part ends at a byte boundary. `is_last` ends the stream.
    pub(super) fn part(&mut self, data: &[u8], is_last: bool, out: &mut Vec<u8>) {
        self.estimate(data);
        self.tokenize(data);
        let block = Block::new(data, &self.tokens);
        let stored = data.len() + 5 * data.len().div_ceil(MAX_STORED);
        if block.bits.div_ceil(8) < stored as u64 {
            block.write(data, &self.tokens, is_last, out);
        } else {
            store(data, is_last, out);
        }
    }

    /// Estimates the cost of each literal from how often it occurs.
    fn estimate(&mut self, data: &[u8]) {
        let histogram = histogram(data);
        // An integer logarithm, because `f32::log2` differs between machines. Even the most frequent literal has a code of one
        // bit. A long match saves most of these bits, so the cost is at least half a bit.
        let cost = |count: u32| eighths_of_log2(data.len() as u64 * 256 / u64::from(count.max(1))).max(4);
        let bits = histogram.map(cost);
        let mut sum = 0u32;
        self.costs.clear();
        self.costs.push(0);
        self.costs.extend(data.iter().map(|byte| {
            sum = sum.wrapping_add(bits[usize::from(*byte)]);
            sum
        }));
    }

    /// Splits the data into literals and matches.
    fn tokenize(&mut self, data: &[u8]) {
        self.table.fill(0);
        self.tokens.clear();
        let (mut at, mut literals, mut misses) = (0, 0, 0u32);
        while let Some(mut best) = self.probe(data, literals, at) {
            if best.gain <= 0 {
                misses += 1;
                at += (1 + (misses >> PATIENCE) as usize).min(MAX_STEP);
                continue;
            }
            // Lazy matching: a better match that begins one byte later is preferred.
            while let Some(next) = self.probe(data, literals, best.at + 1).filter(|next| next.gain > best.gain) {
                best = next;
            }
            let (length, distance) = (best.length as u16, best.distance as u16);
            self.tokens.push(Token { literals: (best.at - literals) as u32, length, distance });
            at = best.at + best.length;
            (literals, misses) = (at, 0);
        }
        self.tokens.push(Token { literals: (data.len() - literals) as u32, length: 0, distance: 0 });
    }

    /// The match at a position. Stores the position for later matches. `None` near the end of the data, where there is no hash.
    fn probe(&mut self, data: &[u8], literals: usize, at: usize) -> Option<Match> {
        let word = word_at(data, at)?;
        let slot = &mut self.table[(word.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - HASH_BITS)) as usize];
        let candidate = std::mem::replace(slot, at as u32) as usize;
        // An empty slot points to position 0, which is a candidate like any other.
        if candidate >= at || at - candidate > WINDOW || word_at(data, candidate) != Some(word) {
            return Some(Match { at, length: 0, distance: 0, gain: 0 });
        }
        let distance = at - candidate;
        let ahead = match_length(data, at, distance);
        // With steps larger than one the match may have begun earlier.
        let before = data[literals..at].iter().rev().zip(data[..candidate].iter().rev());
        let before = before.take(MAX_MATCH - ahead).take_while(|(a, b)| a == b).count();
        let (at, length) = (at - before, ahead + before);
        let extra = length_symbol(length as u16).1 + distance_symbol(distance as u16).1;
        let gain = self.costs[at + length].wrapping_sub(self.costs[at]) as i32 - 8 * (MATCH_BITS + extra as i32);
        Some(Match { at, length, distance, gain })
    }
}

/// How often each byte occurs.
fn histogram(data: &[u8]) -> [u32; 256] {
    // Four histograms, because increments of the same counter would have to wait for each other.
    let mut parts = [[0u32; 256]; 4];
    let (fours, rest) = data.as_chunks::<4>();
    for four in fours {
        (0..4).for_each(|i| parts[i][usize::from(four[i])] += 1);
    }
    rest.iter().for_each(|byte| parts[0][usize::from(*byte)] += 1);
    std::array::from_fn(|byte| parts.iter().map(|part| part[byte]).sum())
}

/// Eight times log2 of `number / 256`, interpolated linearly between powers of two.
fn eighths_of_log2(number: u64) -> u32 {
    let whole = number.max(256).ilog2();
    8 * (whole - 8) + (((number.max(256) - (1 << whole)) << 3) >> whole) as u32
}

/// The eight bytes at a position, if that many are left.
fn word_at(data: &[u8], at: usize) -> Option<u64> {
    data.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

/// How many bytes from `start` on repeat the bytes `distance` before them.
fn match_length(data: &[u8], start: usize, distance: usize) -> usize {
    let mut length = 0;
    while length + 8 <= MAX_MATCH {
        let (Some(here), Some(there)) = (word_at(data, start + length), word_at(data, start + length - distance)) else { break };
        if here != there {
            return length + ((here ^ there).trailing_zeros() / 8) as usize;
        }
        length += 8;
    }
    while length < MAX_MATCH && start + length < data.len() && data[start + length] == data[start + length - distance] {
        length += 1;
    }
    length
}

/// The symbol of a match length, with the number of extra bits and their value.
fn length_symbol(length: u16) -> (usize, u32, u64) {
    match usize::from(length) - 3 {
        255 => (285, 0, 0),
        rest @ 0..8 => (257 + rest, 0, 0),
        rest => {
            let bits = rest.ilog2() - 2;
            (257 + 4 * bits as usize + (rest >> bits), bits, (rest & ((1 << bits) - 1)) as u64)
        }
    }
}

/// The symbol of a distance, with the number of extra bits and their value.
fn distance_symbol(distance: u16) -> (usize, u32, u64) {
    match usize::from(distance) - 1 {
        rest @ 0..4 => (rest, 0, 0),
        rest => {
            let bits = rest.ilog2() - 1;
            (2 * bits as usize + (rest >> bits), bits, (rest & ((1 << bits) - 1)) as u64)
        }
    }
}

/// Huffman codes in the bit order of the file: the first bit is the lowest.
struct Codes(Vec<(u64, u32)>);

impl Codes {
    fn new(lengths: &[u8]) -> Self {
        let code = |(code, length): (u16, &u8)| (u64::from(code.reverse_bits() >> ((16 - length) & 15)), u32::from(*length));
        Self(canonical_codes(lengths).into_iter().zip(lengths).map(code).collect())
    }
}

/// A block with its own Huffman codes.
struct Block {
    literals: Vec<u8>,
    distances: Vec<u8>,
    /// The lengths of both codes, run-length coded: symbol, number of extra bits and their value.
    runs: Vec<(usize, u32, u64)>,
    run_lengths: Vec<u8>,
    /// The block's size in bits, including the stored block that ends it.
    bits: u64,
}

impl Block {
    fn new(data: &[u8], tokens: &[Token]) -> Self {
        let mut literals = [0u32; 286];
        let mut distances = [0u32; 30];
        let mut extra = 0;
        literals[END] = 1;
        // Most parts have few matches, so all bytes are counted first and the matched bytes subtracted.
        literals[..256].copy_from_slice(&histogram(data));
        let mut at = 0;
        for token in tokens {
            at += token.literals as usize;
            if token.length > 0 {
                let (length, distance) = (length_symbol(token.length), distance_symbol(token.distance));
                literals[length.0] += 1;
                distances[distance.0] += 1;
                extra += u64::from(length.1 + distance.1);
                data[at..at + usize::from(token.length)].iter().for_each(|byte| literals[usize::from(*byte)] -= 1);
                at += usize::from(token.length);
            }
        }
        let literal_lengths = code_lengths(&literals, MAX_LITERAL_BITS);
        let distance_lengths = code_lengths(&distances, MAX_DISTANCE_BITS);
        let trimmed =
            |lengths: &[u8], least: usize| lengths.iter().rposition(|l| *l > 0).map_or(least, |last| least.max(last + 1));
        let all =
            [&literal_lengths[..trimmed(&literal_lengths, 257)], &distance_lengths[..trimmed(&distance_lengths, 1)]].concat();
        let runs = run_length_code(&all);
        let mut frequencies = [0u32; 19];
        runs.iter().for_each(|run| frequencies[run.0] += 1);
        let run_lengths = code_lengths(&frequencies, 7);
        let cost = |frequencies: &[u32], lengths: &[u8]| -> u64 {
            frequencies.iter().zip(lengths).map(|(f, length)| u64::from(*f) * u64::from(*length)).sum()
        };
        let header = 3 + 14 + 3 * 19 + cost(&frequencies, &run_lengths) + runs.iter().map(|run| u64::from(run.1)).sum::<u64>();
        // An empty stored block, of at most 42 bits, follows the block and ends at a byte boundary.
        let bits = header + extra + cost(&literals, &literal_lengths) + cost(&distances, &distance_lengths) + 42;
        Self { literals: literal_lengths, distances: distance_lengths, runs, run_lengths, bits }
    }

    fn write(&self, data: &[u8], tokens: &[Token], is_last: bool, out: &mut Vec<u8>) {
        let mut bits = Bits::new(out, self.bits);
        bits.add(u64::from(is_last) | 2 << 1, 3);
        let literal_count = self.literals.iter().rposition(|l| *l > 0).map_or(257, |last| last.max(256) + 1);
        let distance_count = self.distances.iter().rposition(|l| *l > 0).map_or(1, |last| last + 1);
        let length_count = LENGTH_ORDER.iter().rposition(|i| self.run_lengths[*i] > 0).map_or(4, |last| last.max(3) + 1);
        bits.add((literal_count - 257) as u64, 5);
        bits.add((distance_count - 1) as u64, 5);
        bits.add((length_count - 4) as u64, 4);
        LENGTH_ORDER[..length_count].iter().for_each(|i| bits.add(u64::from(self.run_lengths[*i]), 3));
        let codes = Codes::new(&self.run_lengths).0;
        for &(symbol, extra, value) in &self.runs {
            bits.add(codes[symbol].0, codes[symbol].1);
            bits.add(value, extra);
        }
        self.write_tokens(data, tokens, &mut bits);
        if !is_last {
            bits.add(0, 3);
        }
        bits.align();
        if !is_last {
            bits.add(0xFFFF_0000, 32);
        }
        bits.finish();
    }

    fn write_tokens(&self, data: &[u8], tokens: &[Token], bits: &mut Bits<'_>) {
        let (literals, distances) = (Codes::new(&self.literals).0, Codes::new(&self.distances).0);
        // An array of 256 needs no bounds check.
        let mut bytes = [(0, 0); 256];
        bytes.copy_from_slice(&literals[..256]);
        let mut at = 0;
        for token in tokens {
            let (fours, rest) = data[at..at + token.literals as usize].as_chunks::<4>();
            for four in fours {
                for byte in four {
                    let (code, length) = bytes[usize::from(*byte)];
                    bits.push(code, length);
                }
                bits.flush();
            }
            for byte in rest {
                let (code, length) = bytes[usize::from(*byte)];
                bits.add(code, length);
            }
            at += token.literals as usize + usize::from(token.length);
            if token.length > 0 {
                let (symbol, extra, value) = length_symbol(token.length);
                bits.push(literals[symbol].0, literals[symbol].1);
                bits.push(value, extra);
                let (symbol, extra, value) = distance_symbol(token.distance);
                bits.push(distances[symbol].0, distances[symbol].1);
                bits.push(value, extra);
                bits.flush();
            }
        }
        bits.add(literals[END].0, literals[END].1);
    }
}

/// Run-length encodes code lengths: 16 repeats the last length 3 to 6 times, 17 and 18 are 3 to 10 and 11 to 138 zeros.
fn run_length_code(lengths: &[u8]) -> Vec<(usize, u32, u64)> {
    let mut runs = Vec::new();
    for run in lengths.chunk_by(|a, b| a == b) {
        let (length, mut left) = (run[0], run.len());
        if length > 0 {
            runs.push((usize::from(length), 0, 0));
            left -= 1;
        }
        while left > 0 {
            let (symbol, extra, value, taken) = match (length, left) {
                (0, 11..) => (18, 7, left.min(138) - 11, left.min(138)),
                (0, 3..) => (17, 3, left - 3, left),
                (1.., 3..) => (16, 2, left.min(6) - 3, left.min(6)),
                _ => (usize::from(length), 0, 0, 1),
            };
            runs.push((symbol, extra, value as u64));
            left -= taken;
        }
    }
    runs
}

/// Stores data that does not compress.
fn store(data: &[u8], is_last: bool, out: &mut Vec<u8>) {
    let mut blocks = data.chunks(MAX_STORED).peekable();
    while let Some(block) = blocks.next() {
        let length = block.len() as u16;
        out.push(u8::from(is_last && blocks.peek().is_none()));
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(&(!length).to_le_bytes());
        out.extend_from_slice(block);
    }
}

/// Writes bits, the lowest first.
struct Bits<'a> {
    out: &'a mut Vec<u8>,
    at: usize,
    pending: u64,
    count: u32,
}

impl<'a> Bits<'a> {
    /// Starts after the bytes that are in `out`, and makes room for `bits` bits.
    fn new(out: &'a mut Vec<u8>, bits: u64) -> Self {
        let at = out.len();
        // Writes go in whole words, of which only the full bytes count.
        out.resize(at + (bits / 8) as usize + 16, 0);
        Self { out, at, pending: 0, count: 0 }
    }

    /// Adds bits. The caller flushes before more than 64 bits are pending.
    fn push(&mut self, bits: u64, count: u32) {
        self.pending |= bits << self.count;
        self.count = self.count.wrapping_add(count);
    }

    /// Writes all full bytes. At most seven bits stay pending.
    fn flush(&mut self) {
        self.out[self.at..self.at + 8].copy_from_slice(&self.pending.to_le_bytes());
        self.at += (self.count / 8) as usize;
        self.pending >>= self.count & 56;
        self.count &= 7;
    }

    /// Adds at most 56 bits.
    fn add(&mut self, bits: u64, count: u32) {
        self.push(bits, count);
        self.flush();
    }

    /// Pads the last byte with zeros.
    fn align(&mut self) {
        self.count = self.count.next_multiple_of(8);
        self.flush();
    }

    fn finish(self) {
        self.out.truncate(self.at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn inflate(bytes: &[u8]) -> Vec<u8> {
        let mut decoder = flate2::bufread::DeflateDecoder::new(bytes);
        let mut data = Vec::new();
        decoder.read_to_end(&mut data).unwrap();
        assert!(decoder.into_inner().is_empty(), "the stream ends before its bytes do");
        data
    }

    /// Compresses data in parts of `part` bytes and checks that flate2 restores it.
    fn check(data: &[u8], part: usize) -> usize {
        let (mut deflater, mut out) = (Deflater::new(), Vec::new());
        let mut parts = data.chunks(part.max(1)).peekable();
        while let Some(part) = parts.next() {
            deflater.part(part, parts.peek().is_none(), &mut out);
        }
        assert!(inflate(&out) == data, "{} bytes in parts of {part}", data.len());
        out.len()
    }

    fn random(seed: u64) -> impl FnMut() -> u64 {
        let mut state = seed;
        move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        }
    }

    #[test]
    fn every_length_comes_back() {
        let mut next = random(1);
        let noise: Vec<u8> = (0..600).map(|_| next() as u8).collect();
        let few: Vec<u8> = (0..600).map(|_| (next() % 3) as u8).collect();
        for length in 1..600 {
            for data in [&noise, &few, &vec![7; 600], &noise[..40].repeat(15)] {
                check(&data[..length], length);
                check(&data[..length], 1 + length / 3);
            }
        }
    }

    #[test]
    fn data_of_every_kind_comes_back() {
        for seed in 0..60 {
            let mut next = random(seed);
            let length = 1 + next() as usize % 200_000;
            let part = 1 + next() as usize % 100_000;
            let spread = next() % 32;
            let mut data: Vec<u8> = (0..length).map(|_| (next() >> spread) as u8).collect();
            // Copies of earlier data, so that distances and lengths of all sizes occur.
            for _ in 0..next() % 200 {
                let (from, to) = (next() as usize % length, next() as usize % length);
                let count = (1 + next() as usize % 700).min(length - from.max(to));
                data.copy_within(from..from + count, to);
            }
            check(&data, part);
        }
    }

    /// Histograms that need the longest codes: Fibonacci numbers, and one byte among all others.
    #[test]
    fn deep_codes_come_back() {
        let mut next = random(3);
        let mut fibonacci = (1, 1);
        let mut data = Vec::new();
        for byte in 0..24u8 {
            data.extend(std::iter::repeat_n(byte, fibonacci.0));
            fibonacci = (fibonacci.1, fibonacci.0 + fibonacci.1);
        }
        let mut mixed = data.clone();
        for i in (1..mixed.len()).rev() {
            mixed.swap(i, next() as usize % (i + 1));
        }
        check(&data, data.len());
        check(&mixed, mixed.len());
        let mut rare = vec![0; 300_000];
        (0..=255).for_each(|byte| rare[1000 * usize::from(byte) + usize::from(byte)] = byte);
        check(&rare, rare.len());
    }

    #[test]
    fn the_sizes_of_extremes() {
        let mut next = random(4);
        let noise: Vec<u8> = (0..200_000).map(|_| next() as u8).collect();
        // Four stored blocks.
        assert_eq!(check(&noise, noise.len()), 200_000 + 4 * 5);
        assert!(check(&vec![9; 1_000_000], 1_000_000) < 2000);
        // A match of each length and, at the edge of the window, of the largest distance.
        let far = [&noise[..300], &noise[1000..1000 + WINDOW - 300], &noise[..300]].concat();
        assert!(check(&far, far.len()) < WINDOW + 100);
        let beyond = [&noise[..300], &noise[1000..1001 + WINDOW - 300], &noise[..300]].concat();
        assert!(check(&beyond, beyond.len()) > WINDOW + 300);
    }

    /// Symbols and extra bits against the tables of RFC 1951.
    #[test]
    fn symbols_of_the_rfc() {
        for (length, want) in
            [(3, (257, 0, 0)), (10, (264, 0, 0)), (11, (265, 1, 0)), (12, (265, 1, 1)), (34, (272, 2, 3)), (35, (273, 3, 0))]
        {
            assert_eq!(length_symbol(length), want, "{length}");
        }
        assert_eq!([length_symbol(257), length_symbol(258)], [(284, 5, 30), (285, 0, 0)]);
        for (distance, want) in
            [(1, (0, 0, 0)), (4, (3, 0, 0)), (5, (4, 1, 0)), (6, (4, 1, 1)), (9, (6, 2, 0)), (24_577, (29, 13, 0))]
        {
            assert_eq!(distance_symbol(distance), want, "{distance}");
        }
        assert_eq!(distance_symbol(32_768), (29, 13, 8191));
    }
}
