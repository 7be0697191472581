//! Checks the kernels' layouts (`layouts.cu`): each is a bijection, and has the places that tensor cores, TMA and files expect. The
//! self-test checks fragment layouts, because it asks the instructions themselves.

use crate::policies::abi::{KL_SWIGLU, KlGemmRows, KlGemmStream, KlGemmTma, KlMat, KlOutputRange};
use kiln::internals::tensor::nvfp4;
use kiln_emulator::{DeviceMemory, Launch, entry, finish, launch};
use std::collections::BTreeSet;
use std::mem::offset_of;

const LANES: usize = 32;
const SHAPE: Launch = Launch { grid: [1, 1, 1], threads: LANES as u32, shared: 0, cluster: 1, overlap: 0, capability: 120 };

fn run(kernel: &str, shape: &Launch, params: &[u8]) {
    launch(entry("layouts", kernel).unwrap(), shape, params, 0).unwrap();
    finish().unwrap();
}

fn read(memory: &DeviceMemory, address: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    memory.read(address, &mut data).unwrap();
    data
}

fn words(memory: &DeviceMemory, address: u64, count: usize) -> Vec<usize> {
    read(memory, address, 4 * count).as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes) as usize).collect()
}

/// Whether the places are 0, step, 2 step, ..., each once.
fn is_bijection(places: &[usize], step: usize) -> bool {
    places.iter().copied().collect::<BTreeSet<_>>().into_iter().eq((0..places.len()).map(|i| i * step))
}

#[test]
fn layouts_are_bijections_with_known_places() {
    needs_emulator!();
    let memory = DeviceMemory::default();
    let sizes = [16 * 2, 16 * 4, 16 * 8, 256 * 8, LANES * 4, LANES * 4];
    let addresses = sizes.map(|words| memory.allocate(4 * words as u64).unwrap());
    run("layouts", &SHAPE, &addresses.map(u64::to_le_bytes).concat());
    let [by_32, by_64, by_128, scales, halves, whole] = [0, 1, 2, 3, 4, 5].map(|i| words(&memory, addresses[i], sizes[i]));

    // Swizzles: 16-byte chunks stay in their rows, and the same chunk of eight rows is in different banks.
    for (places, chunks) in [(&by_32, 2), (&by_64, 4), (&by_128, 8)] {
        assert!(is_bijection(places, 16));
        assert!(places.iter().enumerate().all(|(i, place)| place / 16 / chunks == i / chunks), "{places:?}");
        for (first, chunk) in (0..16).step_by(8).flat_map(|first| (0..chunks).map(move |chunk| (first, chunk))) {
            let banks: BTreeSet<usize> = (first..first + 8).map(|row| places[row * chunks + chunk] / 16 % 8).collect();
            assert_eq!(banks.len(), 8, "rows of {chunks} chunks, from row {first} on");
        }
    }
    let chunks = |places: &[usize], row: usize, chunks: usize| -> Vec<usize> {
        places[row * chunks..][..chunks].iter().map(|place| place / 16 % chunks).collect()
    };
    assert_eq!([0, 1, 2, 3, 4, 7].map(|row| chunks(&by_32, row, 2)), [[0, 1], [0, 1], [0, 1], [0, 1], [1, 0], [1, 0]]);
    assert_eq!(
        [0, 1, 2, 3, 5, 7, 8].map(|row| chunks(&by_64, row, 4)),
        [[0, 1, 2, 3], [0, 1, 2, 3], [1, 0, 3, 2], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0], [0, 1, 2, 3]]
    );
    assert_eq!(
        [0, 1, 6, 9].map(|row| chunks(&by_128, row, 8)),
        [[0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 3, 2, 5, 4, 7, 6], [6, 7, 4, 5, 2, 3, 0, 1], [1, 0, 3, 2, 5, 4, 7, 6]]
    );

    // Block scales: two tiles along K come before the next 128 rows. The host has the same places, and their inverse.
    assert!(is_bijection(&scales, 1));
    let scale = |row: usize, block: usize| scales[row * 8 + block];
    for (i, &place) in scales.iter().enumerate() {
        let (row, block) = (i / 8, i % 8);
        assert_eq!((nvfp4::scale_offset(row, block, 2), nvfp4::scale_place(place, 2)), (place, (row, block)));
    }
    assert_eq!([scale(0, 0), scale(0, 3), scale(1, 0), scale(32, 0), scale(96, 1), scale(127, 3)], [0, 3, 16, 4, 13, 511]);
    assert_eq!([scale(0, 4), scale(33, 6), scale(128, 0), scale(255, 7)], [512, 534, 1024, 2047]);

    // Exchanges within a quad: lane i ends up with item i of each lane.
    for items in [&halves, &whole] {
        assert!(is_bijection(items, 1));
        for (i, &item) in items.iter().enumerate() {
            let (quad, lane, from) = (i / 16, i / 4 % 4, i % 4);
            assert_eq!(item, 16 * quad + 4 * from + lane);
        }
        assert_eq!(items[..8], [0, 4, 8, 12, 1, 5, 9, 13]);
    }
}

/// Rows and columns of the GEMM's tile, and of its SwiGLU output; bytes of two scale tiles along K.
const ROWS: usize = 256;
const COLS: usize = 128;
const SWIGLU_COLS: usize = 64;
const SCALES: usize = 2 * nvfp4::TILE_BYTES;
const TILE: Launch = Launch { threads: 384, ..SHAPE };

/// The parameter of a single tile with this output. The weight's rows begin at `first[0]`; with SwiGLU, ups begin at `first[1]`.
fn tile(kernel: &str, out: KlMat, epilogue: u32, first: [u32; 2], offsets: u64, bit: u32) -> Vec<u8> {
    let mut params = vec![0; entry("layouts", kernel).unwrap().param_bytes as usize];
    let mut put = |offset: usize, bytes: &[u8]| params[offset..][..bytes.len()].copy_from_slice(bytes);
    let stream = offset_of!(KlGemmTma, stream);
    let part = stream + offset_of!(KlGemmStream, part);
    let mat = part + offset_of!(KlOutputRange, out);
    for (offset, word) in [
        (stream + offset_of!(KlGemmStream, row_tiles), 1),
        (stream + offset_of!(KlGemmStream, col_tiles), 1),
        (part + offset_of!(KlOutputRange, tiles), 1),
        (part + offset_of!(KlOutputRange, epilogue), epilogue),
        (offset_of!(KlGemmTma, group), 1),
        (mat + offset_of!(KlMat, rows), out.rows),
        (mat + offset_of!(KlMat, cols), out.cols),
        (mat + offset_of!(KlMat, scale), out.scale.to_bits()),
        (size_of::<KlGemmTma>() + size_of::<u64>(), bit),
    ] {
        put(offset, &word.to_ne_bytes());
    }
    for (half, first) in first.into_iter().enumerate() {
        let rows = part + offset_of!(KlOutputRange, w) + half * size_of::<KlGemmRows>();
        put(rows + offset_of!(KlGemmRows, first), &first.to_ne_bytes());
    }
    let words = [
        (mat + offset_of!(KlMat, data), out.data),
        (mat + offset_of!(KlMat, scales), out.scales),
        (mat + offset_of!(KlMat, stride), out.stride),
        (size_of::<KlGemmTma>(), offsets),
    ];
    words.into_iter().for_each(|(offset, word)| put(offset, &word.to_ne_bytes()));
    params
}

/// Lane `l` supplies an MMA with scales of A and B. For A, selector l % 4 / 2 chooses the 64-row tile, and the row is l / 4 + 8 (l % 2).
/// For B, selector l % 4 counts columns by eights, and the column is l / 4.
#[test]
fn lanes_load_the_scales_that_they_supply() {
    needs_emulator!();
    let memory = DeviceMemory::default();
    let out = memory.allocate(4 * 3 * (8 * LANES) as u64).unwrap();
    let no_mat = KlMat { data: 0, scales: 0, stride: 0, rows: 0, cols: 0, dtype: 0, scale: 0.0 };
    // Weights that begin with either half of a scale tile, and gates and ups that begin with different halves.
    for (epilogue, first, starts) in
        [(0, [0; 2], [0, 64]), (0, [64; 2], [64, 128]), (KL_SWIGLU, [0, 192], [0, 192]), (KL_SWIGLU, [320, 128], [320, 128])]
    {
        run("scales_of_lanes", &TILE, &tile("scales_of_lanes", no_mat, epilogue, first, out, 0));
        let found = words(&memory, out, 3 * 8 * LANES);
        for warp in 0..8 {
            let of = |lane: usize| &found[3 * (warp * LANES + lane)..][..3];
            // Each word of four A scales that the warp needs, by selector and fragment row.
            for (selector, row) in (0..2).flat_map(|selector| (0..16).map(move |row| (selector, row))) {
                let in_tile = warp / 4 * 128 + warp % 4 * 16 + selector * 64 + row;
                let lane = row % 8 * 4 + selector * 2 + row / 8;
                let tile = in_tile / nvfp4::TILE_ROWS * SCALES;
                assert_eq!(of(lane)[0], tile + nvfp4::scale_offset(in_tile % nvfp4::TILE_ROWS, 0, 2), "row {in_tile}");
            }
            for (fragment, col) in (0..COLS / 8).flat_map(|fragment| (0..8).map(move |col| (fragment, col))) {
                let (half, word, selector) = (fragment / 8, fragment / 4 % 2, fragment % 4);
                let row = starts[half] + fragment % 8 * 8 + col;
                let want = half * SCALES + nvfp4::scale_offset(row % nvfp4::TILE_ROWS, 0, 2);
                assert_eq!(of(col * 4 + selector)[1 + half] + 4 * word, want, "row {row} of the weight");
            }
        }
    }
}

/// Stores SwiGLU results as e2m1: each result goes to the nibble of its row and column, and each scale to its place.
#[test]
fn results_of_e2m1_are_stored_in_their_places() {
    needs_emulator!();
    let memory = DeviceMemory::default();
    let (count, blocks) = (ROWS * SWIGLU_COLS, ROWS * SWIGLU_COLS / nvfp4::BLOCK);
    let (data, scales) = (memory.allocate(count as u64 / 2).unwrap(), memory.allocate(blocks as u64).unwrap());
    let (rows, cols, dtype, scale) = (ROWS as u32, SWIGLU_COLS as u32, 0, 1.0);
    let out = KlMat { data, scales, stride: cols.into(), rows, cols, dtype, scale };
    // The index of the result stored at each place, bit by bit.
    let (mut elements, mut of_blocks) = (vec![0; count], vec![0; blocks]);
    for bit in 0..count.ilog2() {
        run("store_signs", &TILE, &tile("store_signs", out, KL_SWIGLU, [0; 2], 0, bit));
        for (i, element) in elements.iter_mut().enumerate() {
            let byte = read(&memory, data + i as u64 / 2, 1)[0];
            let code = if i % 2 == 0 { byte >> 4 } else { byte & 15 };
            assert_eq!(code & 7, 7, "6 is the largest of every block");
            *element |= usize::from(code >> 3) << bit;
        }
        for (i, block) in of_blocks.iter_mut().enumerate() {
            let place = nvfp4::scale_offset(i / 4, i % 4, 1);
            let code = read(&memory, scales + place as u64, 1)[0];
            let (one, two) = (0x38, 0x40);
            assert!([one, two].contains(&code), "{code:#x}");
            *block |= usize::from(code == two) << bit;
        }
    }
    assert!(elements.into_iter().eq(0..count));
    assert!(of_blocks.into_iter().eq(0..blocks));
}
