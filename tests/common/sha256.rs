//! SHA-256 (FIPS 180-4), for fingerprints that others published.

/// The digest of a message as hexadecimal digits.
pub fn hex(message: &[u8]) -> String {
    let mut padded = message.to_vec();
    padded.push(0x80);
    padded.resize((padded.len() + 8).next_multiple_of(64) - 8, 0);
    padded.extend((8 * message.len() as u64).to_be_bytes());
    let (constants, mut state) = constants();
    for block in padded.as_chunks::<64>().0 {
        compress(&mut state, block, &constants);
    }
    state.iter().map(|word| format!("{word:08x}")).collect()
}

/// The fractional parts of the cube roots and the square roots of the first primes.
fn constants() -> ([u32; 64], [u32; 8]) {
    let is_prime = |n: &u64| (2..*n).take_while(|d| d * d <= *n).all(|d| !n.is_multiple_of(d));
    let primes: Vec<u64> = (2..).filter(is_prime).take(64).collect();
    // The low 32 bits of the largest root whose power is at most p * 2^(32 power) are the fraction.
    let root = |p: u64, power: u32| {
        let (mut low, mut high) = (0_u128, 1_u128 << 36);
        while high - low > 1 {
            let middle = (low + high) / 2;
            let fits = middle.pow(power) <= u128::from(p) << (32 * power);
            *(if fits { &mut low } else { &mut high }) = middle;
        }
        low as u32
    };
    (std::array::from_fn(|i| root(primes[i], 3)), std::array::from_fn(|i| root(primes[i], 2)))
}

fn compress(state: &mut [u32; 8], block: &[u8; 64], constants: &[u32; 64]) {
    let mut words = [0; 64];
    words.iter_mut().zip(block.as_chunks().0).for_each(|(word, bytes)| *word = u32::from_be_bytes(*bytes));
    for i in 16..64 {
        let (a, b) = (words[i - 15], words[i - 2]);
        let a = a.rotate_right(7) ^ a.rotate_right(18) ^ (a >> 3);
        let b = b.rotate_right(17) ^ b.rotate_right(19) ^ (b >> 10);
        words[i] = words[i - 16].wrapping_add(a).wrapping_add(words[i - 7]).wrapping_add(b);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (word, constant) in words.iter().zip(constants) {
        let sum = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let first = h.wrapping_add(sum).wrapping_add((e & f) ^ (!e & g)).wrapping_add(*constant).wrapping_add(*word);
        let sum = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let second = sum.wrapping_add((a & b) ^ (a & c) ^ (b & c));
        (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(first), c, b, a, first.wrapping_add(second));
    }
    state.iter_mut().zip([a, b, c, d, e, f, g, h]).for_each(|(word, new)| *word = word.wrapping_add(new));
}
