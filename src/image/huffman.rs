//! Huffman codes of bounded length, for DEFLATE and JPEG.

/// The code length of every symbol, at most `limit`, from symbol frequencies. Symbols that do not occur have length 0. The code
/// is complete: with fewer than two symbols in use, others get a code as well, because some decoders reject incomplete codes.
///
/// Lengths come from Huffman's algorithm on two queues. Codes that are too long are shortened to the limit, and symbols with the
/// longest codes below it are lengthened until Kraft's sum is 1 again.
pub(super) fn code_lengths(frequencies: &[u32], limit: usize) -> Vec<u8> {
    let mut lengths = vec![0; frequencies.len()];
    // Ties are broken by the symbol, so that the result is the same everywhere.
    let mut used: Vec<(u32, usize)> =
        frequencies.iter().enumerate().filter(|(_, frequency)| **frequency > 0).map(|(symbol, f)| (*f, symbol)).collect();
    let unused = (0..frequencies.len()).filter(|symbol| frequencies[*symbol] == 0);
    let missing = 2usize.saturating_sub(used.len());
    used.extend(unused.take(missing).map(|symbol| (0, symbol)));
    used.sort_unstable();
    let mut counts = limit_depths(&depths(&used), limit);
    // The rarest symbols get the longest codes.
    let mut length = limit;
    for &(_, symbol) in &used {
        while counts[length] == 0 {
            length -= 1;
        }
        counts[length] -= 1;
        lengths[symbol] = length as u8;
    }
    lengths
}

/// How many leaves of the Huffman tree are at each depth. `used` has at least two symbols, sorted by frequency.
fn depths(used: &[(u32, usize)]) -> Vec<usize> {
    let leaves = used.len();
    // Nodes in the order of their creation: first all leaves, then inner nodes, whose weights only grow.
    let mut weights: Vec<u64> = used.iter().map(|(frequency, _)| u64::from(*frequency)).collect();
    let mut parents = vec![0; 2 * leaves - 1];
    let (mut leaf, mut inner) = (0, leaves);
    for node in leaves..2 * leaves - 1 {
        let mut weight = 0;
        for _ in 0..2 {
            let lightest =
                if leaf < leaves && (inner == node || weights[leaf] <= weights[inner]) { &mut leaf } else { &mut inner };
            weight += weights[*lightest];
            parents[*lightest] = node;
            *lightest += 1;
        }
        weights.push(weight);
    }
    let mut depth = vec![0; 2 * leaves - 1];
    for node in (0..2 * leaves - 2).rev() {
        depth[node] = depth[parents[node]] + 1;
    }
    let mut counts = vec![0; leaves];
    depth[..leaves].iter().for_each(|&depth| counts[depth] += 1);
    counts
}

/// Limits the depths of leaves, given as counts by depth. The leaves still form a complete tree.
fn limit_depths(counts: &[usize], limit: usize) -> Vec<usize> {
    let mut limited = vec![0; limit + 1];
    for (depth, count) in counts.iter().enumerate() {
        limited[depth.min(limit)] += count;
    }
    // Kraft's sum in units of the deepest leaf. Moving leaves up to the limit made it too large.
    let mut sum: usize = limited.iter().enumerate().map(|(depth, count)| count << (limit - depth)).sum();
    while sum > 1 << limit {
        // A leaf at the limit moves up and joins the deepest leaf above the limit, one level below that leaf's place. This frees one unit.
        let above = (1..limit).rev().find(|&depth| limited[depth] > 0).unwrap_or_else(|| unreachable!("more symbols than codes"));
        limited[limit] -= 1;
        limited[above] -= 1;
        limited[above + 1] += 2;
        sum -= 1;
    }
    limited
}

/// Canonical codes of these lengths (RFC 1951, 3.2.2; the same order as ITU-T T.81, annex C), first bit highest.
pub(super) fn canonical_codes(lengths: &[u8]) -> Vec<u16> {
    let mut next = [0u16; 17];
    for length in 1..17u8 {
        let shorter = lengths.iter().filter(|other| **other == length - 1 && length > 1).count() as u16;
        next[usize::from(length)] = (next[usize::from(length) - 1] + shorter) << 1;
    }
    let code = |length: &u8| match *length {
        0 => 0,
        length => {
            let code = next[usize::from(length)];
            next[usize::from(length)] = code.wrapping_add(1);
            code
        }
    };
    lengths.iter().map(code).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kraft(lengths: &[u8], limit: usize) -> usize {
        lengths.iter().filter(|length| **length > 0).map(|length| 1 << (limit - usize::from(*length))).sum()
    }

    fn cost(frequencies: &[u32], lengths: &[u8]) -> u64 {
        frequencies.iter().zip(lengths).map(|(f, length)| u64::from(*f) * u64::from(*length)).sum()
    }

    /// Frequencies of every kind: equal, random, sparse, powers of two, and Fibonacci numbers, whose tree is the deepest there is.
    fn histograms() -> Vec<Vec<u32>> {
        let fibonacci = |count: usize| -> Vec<u32> {
            let numbers = std::iter::successors(Some((1u32, 1u32)), |&(a, b)| Some((b, a.checked_add(b)?)));
            numbers.map(|(a, _)| a).take(count).collect()
        };
        let mut all: Vec<Vec<u32>> = vec![vec![0; 30], vec![0, 0, 9], vec![5], vec![1; 286], vec![u32::MAX; 286]];
        all.extend((2..44).map(fibonacci));
        all.extend((2..32).map(|bits| (0..bits).map(|bit| 1 << bit).collect()));
        let mut state = 1u64;
        for case in 0..200 {
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                state >> 33
            };
            let symbols = 2 + next() as usize % 285;
            all.push(
                (0..symbols).map(|_| (next() as u32) >> (next() % 32)).map(|f| if case % 3 == 0 { f % 3 } else { f }).collect(),
            );
        }
        // One dominant symbol among all the others.
        all.push((0..286).map(|i| if i == 7 { 1 << 30 } else { 1 }).collect());
        all
    }

    #[test]
    fn codes_are_complete_and_within_the_limit() {
        for frequencies in histograms().iter().filter(|frequencies| frequencies.len() > 1) {
            for limit in [9, 14, 15, 16] {
                let lengths = code_lengths(frequencies, limit);
                assert!(lengths.iter().all(|length| usize::from(*length) <= limit));
                assert_eq!(kraft(&lengths, limit), 1 << limit, "{frequencies:?}");
                assert!(frequencies.iter().zip(&lengths).all(|(f, length)| *f == 0 || *length > 0), "{frequencies:?}");
                // More frequent symbols never have longer codes.
                for (f, length) in frequencies.iter().zip(&lengths) {
                    assert!(frequencies.iter().zip(&lengths).all(|(g, other)| g <= f || other <= length || *f == 0));
                }
            }
        }
    }

    /// Without a limit that binds, the cost is the sum of the weights of all inner nodes, whatever the tree looks like.
    #[test]
    fn unlimited_codes_are_optimal() {
        for frequencies in histograms() {
            let mut weights: Vec<u64> = frequencies.iter().filter(|f| **f > 0).map(|f| u64::from(*f)).collect();
            if weights.len() < 2 {
                continue;
            }
            let mut optimal = 0;
            while weights.len() > 1 {
                weights.sort_unstable_by(|a, b| b.cmp(a));
                let merged = weights.pop().unwrap_or_default() + weights.pop().unwrap_or_default();
                optimal += merged;
                weights.push(merged);
            }
            assert_eq!(cost(&frequencies, &code_lengths(&frequencies, 60)), optimal, "{frequencies:?}");
        }
    }

    /// Shortening 20 Fibonacci codes of up to 19 bits to 15 costs next to nothing; a wrong repair would cost much more.
    #[test]
    fn the_limit_costs_little() {
        for frequencies in histograms().iter().filter(|frequencies| frequencies.len() > 1) {
            let (free, limited) = (code_lengths(frequencies, 60), code_lengths(frequencies, 14));
            let (free, limited) = (cost(frequencies, &free), cost(frequencies, &limited));
            assert!(limited as f64 <= 1.02 * free as f64, "{free} and {limited} bits: {frequencies:?}");
        }
    }

    #[test]
    fn canonical_codes_of_the_rfc() {
        assert_eq!(canonical_codes(&[3, 3, 3, 3, 3, 2, 4, 4]), [2, 3, 4, 5, 6, 0, 14, 15]);
        assert_eq!(canonical_codes(&[2, 1, 0, 3, 3]), [2, 0, 0, 6, 7]);
    }
}
