//! Quantized tensors on the CUDA backend, apart from kernels: weights uploaded as stored in the file, e4m3 and NVFP4 that the host writes
//! and reads, NaN in NVFP4, the count of values out of range, and what is refused.

use crate::driver::{Emulated, Gpu};
use crate::runner::cuda_with;
use kiln::error::{Error, Result};
use kiln::internals::backend::cpu::Cpu;
use kiln::internals::backend::cuda::Cuda;
use kiln::internals::backend::{Backend, Gemm, KvSegment, Linear, Modulated, Op, Role, Softmax, StepKey, Weight};
use kiln::internals::tensor::{
    Arena, Bytes, DType, Nvfp4Layout, Region, Scale, Scales, Scaling, SliceScaling, Stored, Tensor, WeightSlice, nvfp4, quantize,
};
use std::sync::Arc;

fn cuda() -> Cuda {
    cuda_with(&Emulated::new(Gpu::HOPPER), None).unwrap()
}

fn scale(value: f32) -> Scale {
    Scale::new(value).unwrap()
}

fn what(result: Result<()>) -> String {
    match result {
        Err(Error::Op { op, what }) => format!("{op}: {what}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn weights_of_e4m3_are_uploaded_as_they_are() {
    needs_emulator!();
    let (mut cuda, mut arena) = (cuda(), Arena::new(Region::Weights));
    cuda.reserve(Region::Weights, 1 << 20).unwrap();
    let bytes = |data: Vec<u8>| Bytes::new(Arc::new(data));
    // All codes except NaN, which is refused.
    let code = |i: usize| ((i * 7 % 251) as u8) & if i * 7 % 251 % 128 == 127 { 0x80 } else { 0xff };
    let codes = |rows: usize, first: usize| (0..rows * 48).map(|i| code(first + i)).collect::<Vec<u8>>();
    let part = |rows, first, scaling| WeightSlice { bytes: bytes(codes(rows, first)), dtype: DType::E4m3, rows, scaling };
    let read = |cuda: &mut Cuda, t: Tensor| {
        let mut read = vec![0; t.len()];
        cuda.read_bytes(Tensor { dtype: DType::U8, scaling: Scaling::Unscaled, ..t }, &mut read).unwrap();
        read
    };

    // Two slices with row scales, which are placed one after the other like the rows.
    let by_rows = arena.alloc_stored(5, 48, Stored { dtype: DType::E4m3, scales: Scales::Rows }).unwrap();
    let scales: Vec<f32> = (0..5).map(|i| 0.5 + i as f32).collect();
    let stored = |range: std::ops::Range<usize>| bytes(scales[range].iter().flat_map(|v| v.to_le_bytes()).collect());
    let parts = [part(2, 0, SliceScaling::Rows(stored(0..2))), part(3, 96, SliceScaling::Rows(stored(2..5)))];
    cuda.upload(by_rows, Role::Linear, &parts).unwrap();
    assert_eq!(read(&mut cuda, by_rows), codes(5, 0));
    let Scaling::Rows(offset) = by_rows.scaling else { panic!("{by_rows:?}") };
    let held = Tensor { dtype: DType::F32, offset, rows: 1, cols: 5, stride: 5, scaling: Scaling::Unscaled, ..by_rows };
    let mut values = [0.0; 5];
    cuda.read(held, &mut values).unwrap();
    assert_eq!(values[..], scales);

    let one = arena.alloc_stored(3, 48, Stored::fp8(scale(0.25))).unwrap();
    cuda.upload(one, Role::Linear, &[part(3, 5, SliceScaling::Tensor(scale(0.25)))]).unwrap();
    assert_eq!(read(&mut cuda, one), codes(3, 5));

    // Codes are not converted, so they must have the tensor's scale.
    for scaling in [SliceScaling::Unscaled, SliceScaling::Tensor(scale(0.5)), SliceScaling::Rows(stored(0..3))] {
        let refused = what(cuda.upload(one, Role::Linear, &[part(3, 5, scaling)]));
        assert!(refused.contains("parts do not have the format of"), "{refused}");
    }
    let e5m2 = arena.alloc_stored(3, 48, Stored::plain(DType::E5m2)).unwrap();
    let part = WeightSlice { dtype: DType::E5m2, ..part(3, 0, SliceScaling::Unscaled) };
    assert!(what(cuda.upload(e5m2, Role::Linear, &[part])).contains("there are no kernels for"));
}

/// Rows are quantized in pieces that fit the staging buffer, with the same bytes as all at once.
#[test]
fn plain_weights_are_quantized_on_the_way() {
    needs_emulator!();
    // Rows so long that the 16 MiB buffer takes 128 of e4m3, or 256 of e2m1.
    let (rows, cols) = (300, 128 << 10);
    let (mut cuda, mut arena) = (cuda(), Arena::new(Region::Weights));
    let values = |i: usize| (((i * 31) % 4093) as f32 - 2000.0) / 1024.0 / (1 + i / cols % 7) as f32;
    let mut plain = vec![0; 2 * rows * cols];
    plain.chunks_mut(2).enumerate().for_each(|(i, bytes)| DType::Bf16.encode(&[values(i)], bytes));
    let part = WeightSlice::plain(Bytes::new(Arc::new(plain)), DType::Bf16, rows);
    let formats = [Stored { dtype: DType::E4m3, scales: Scales::Rows }, Stored::nvfp4(scale(1.0 / 1024.0))];
    let tensors = formats.map(|stored| arena.alloc_stored(rows, cols, stored).unwrap());
    cuda.reserve(Region::Weights, arena.peak()).unwrap();
    for (t, stored) in tensors.into_iter().zip(formats) {
        cuda.upload(t, Role::Linear, std::slice::from_ref(&part)).unwrap();
        let (codes, scales) = quantize::encoded(&part, stored).unwrap();
        let held = match t.scaling {
            Scaling::Rows(offset) => {
                let scales = Tensor {
                    dtype: DType::U8,
                    offset,
                    rows: 1,
                    cols: 4 * rows,
                    stride: 4 * rows,
                    scaling: Scaling::Unscaled,
                    ..t
                };
                let codes = Tensor { dtype: DType::U8, scaling: Scaling::Unscaled, ..t };
                [codes, scales].map(|view| held(&mut cuda, view).remove(0)).to_vec()
            }
            _ => held(&mut cuda, t),
        };
        assert!(held[0] == *codes && held[1] == *scales, "{stored:?}");
    }
    let infinite = WeightSlice::plain(Bytes::new(Arc::new(DType::F32.encoded(&[f32::INFINITY; 16]))), DType::F32, 1);
    let t = Tensor { rows: 1, cols: 16, stride: 16, ..tensors[0] };
    assert!(what(cuda.upload(t, Role::Linear, &[infinite])).contains("values that are not finite"));
}

/// The bytes of a weight on the device, and the bytes of its block scales.
fn held(cuda: &mut Cuda, t: Tensor) -> Vec<Vec<u8>> {
    let read = |view: Tensor| {
        let mut bytes = vec![0; view.len()];
        cuda.read_bytes(view, &mut bytes).unwrap();
        bytes
    };
    t.as_bytes().map(read).collect()
}

#[test]
fn weights_of_nvfp4_have_the_layout_of_tensors_on_the_device() {
    needs_emulator!();
    const COLS: usize = 80;
    let (mut cuda, mut arena) = (cuda(), Arena::new(Region::Weights));
    cuda.reserve(Region::Weights, 1 << 20).unwrap();
    let bytes = |data: Vec<u8>| Bytes::new(Arc::new(data));
    let tensor = scale(0.25);
    let part = |rows, codes, scales, layout| WeightSlice {
        bytes: bytes(codes),
        dtype: DType::E2m1,
        rows,
        scaling: SliceScaling::Blocks16 { scales: bytes(scales), tensor, layout },
    };
    // Scales of up to 126, which is not a NaN code. The padding of tiles is NaN.
    let codes: Vec<u8> = (0..131 * COLS / 2).map(|i| (i * 7 % 256) as u8).collect();
    let scales: Vec<u8> = (0..131 * COLS / 16).map(|i| (i * 5 % 127) as u8).collect();
    let tiles = |scales: &[u8], rows: usize| {
        let mut tiles = vec![0x7f; nvfp4::scale_bytes(rows, COLS)];
        let (along, blocks) = (nvfp4::tiles_along(COLS), COLS / nvfp4::BLOCK);
        let place = |i: usize| nvfp4::scale_offset(i / blocks, i % blocks, along);
        scales.iter().enumerate().for_each(|(i, &scale)| tiles[place(i)] = scale);
        tiles
    };
    let swapped: Vec<u8> = codes.iter().map(|byte| byte.rotate_left(4)).collect();
    let t = arena.alloc_stored(131, COLS, Stored::nvfp4(tensor)).unwrap();
    for part in [
        part(131, codes.clone(), tiles(&scales, 131), Nvfp4Layout::COMFY),
        part(131, swapped.clone(), tiles(&scales, 131), Nvfp4Layout::MODELOPT_SINGLE),
        part(131, swapped, scales.clone(), Nvfp4Layout::MODELOPT),
    ] {
        let SliceScaling::Blocks16 { layout, .. } = part.scaling else { unreachable!() };
        cuda.upload(t, Role::Linear, &[part]).unwrap();
        let [held, blocks] = &*held(&mut cuda, t) else { panic!("{t:?}") };
        let (along, all) = (nvfp4::tiles_along(COLS), COLS / nvfp4::BLOCK);
        let right = |(i, scale): (usize, &u8)| blocks[nvfp4::scale_offset(i / all, i % all, along)] == *scale;
        assert!(*held == codes && scales.iter().enumerate().all(right), "{layout:?}");
    }

    // Two slices, the second of which begins at a tile.
    let half = |rows: std::ops::Range<usize>| {
        let (codes, scales) = (&codes[rows.start * COLS / 2..rows.end * COLS / 2], &scales[rows.start * 5..rows.end * 5]);
        part(rows.len(), codes.to_vec(), tiles(scales, rows.len()), Nvfp4Layout::COMFY)
    };
    cuda.upload(t, Role::Linear, &[half(0..128), half(128..131)]).unwrap();
    let [held, blocks] = &*held(&mut cuda, t) else { panic!("{t:?}") };
    assert!(*held == codes && *blocks == tiles(&scales, 131));
    let refused = what(cuda.upload(t, Role::Linear, &[half(0..127), half(127..131)]));
    assert!(refused.contains("begin at a tile of the block scales of"), "{refused}");

    // Kernels would mistake a scale that is NaN or negative for another number. A slice with a different scale would be wrong.
    for wrong in [0x7f, 0x80, 0xff] {
        for at in [0, scales.len() - 1] {
            let mut scales = scales.clone();
            scales[at] = wrong;
            let part = part(131, codes.clone(), tiles(&scales, 131), Nvfp4Layout::COMFY);
            let refused = what(cuda.upload(t, Role::Linear, &[part]));
            assert!(refused.contains("block scales that are negative or NaN"), "{refused}");
        }
    }
    let other = arena.alloc_stored(131, COLS, Stored::nvfp4(scale(0.5))).unwrap();
    let refused = what(cuda.upload(other, Role::Linear, &[half(0..131)]));
    assert!(refused.contains("parts do not have the format of"), "{refused}");
}

/// A norm of eight values into e4m3. Four of them are out of range.
struct Clipped {
    out: Tensor,
    x: Tensor,
    weight: Tensor,
}

impl Clipped {
    fn new(cuda: &mut Cuda) -> Self {
        let (mut weights, mut arena) = (Arena::new(Region::Weights), Arena::new(Region::Arena));
        cuda.reserve(Region::Weights, 1 << 20).unwrap();
        let weight = weights.alloc(1, 8, DType::F32).unwrap();
        let gains = Bytes::new(Arc::new([1f32; 8].map(f32::to_le_bytes).concat()));
        cuda.upload(weight, Role::Vector, &[WeightSlice::plain(gains, DType::F32, 1)]).unwrap();
        let x = arena.alloc(1, 8, DType::F32).unwrap();
        let out = arena.alloc_stored(1, 8, Stored::fp8(scale(1.0 / 400.0))).unwrap();
        let clipped = Self { out, x, weight };
        clipped.place(cuda, &arena);
        clipped
    }

    fn place(&self, cuda: &mut Cuda, arena: &Arena) {
        cuda.reserve(Region::Arena, arena.peak()).unwrap();
        // The mean square is nearly one. Divided by the scale, four values are some 565, the others 28.
        cuda.write(self.x, &[1.4, -1.4, 0.07, -0.07, 0.07, 1.4, -0.07, 1.4]).unwrap();
    }

    fn run(&self, be: &mut dyn Backend) -> Result<()> {
        be.run(Op::RmsNorm { out: self.out, x: self.x, weight: self.weight, eps: 1e-6 })
    }
}

#[test]
fn saturation_is_counted_until_it_is_taken() {
    needs_emulator!();
    let mut cuda = cuda();
    assert_eq!(cuda.take_saturated().unwrap(), 0, "without working memory");
    let clipped = Clipped::new(&mut cuda);
    assert_eq!(cuda.take_saturated().unwrap(), 0);
    clipped.run(&mut cuda).unwrap();
    let mut values = [0.0; 8];
    cuda.read(clipped.out, &mut values).unwrap();
    assert_eq!(values[..2], [448.0 / 400.0, -448.0 / 400.0]);
    assert_eq!((cuda.take_saturated().unwrap(), cuda.take_saturated().unwrap()), (4, 0));

    // Run op by op, captured and launched, launched again. Then the working memory changes.
    for _ in 0..3 {
        cuda.step(StepKey("clipped"), &mut |be| clipped.run(be)).unwrap();
    }
    cuda.reserve(Region::Arena, 1 << 20).unwrap();
    assert_eq!((cuda.take_saturated().unwrap(), cuda.take_saturated().unwrap()), (12, 0));

    // Values that the host writes are not results of an op.
    cuda.write(clipped.out, &[f32::MAX; 8]).unwrap();
    assert_eq!(cuda.take_saturated().unwrap(), 0);
}

#[test]
fn a_count_is_not_taken_inside_a_step() {
    needs_emulator!();
    let mut cuda = cuda();
    let clipped = Clipped::new(&mut cuda);
    let body = |be: &mut dyn Backend| {
        clipped.run(be)?;
        be.take_saturated().map(drop)
    };
    // The first step runs op by op, and the second is captured.
    cuda.step(StepKey("taken"), &mut |be| body(be)).unwrap();
    let refused = what(cuda.step(StepKey("taken"), &mut |be| body(be)));
    assert!(refused.contains("take_saturated: a transfer inside a step"), "{refused}");
}

#[test]
fn the_host_writes_and_reads_e4m3() {
    needs_emulator!();
    let (mut cuda, mut arena) = (cuda(), Arena::new(Region::Arena));
    let whole = arena.alloc_stored(3, 40, Stored::fp8(scale(0.25))).unwrap();
    let part = whole.cols(5..25);
    cuda.reserve(Region::Arena, arena.peak()).unwrap();
    cuda.write(whole, &[1.0; 120]).unwrap();
    // Each value is rounded to a multiple of the scale, or to the largest multiple.
    let values: Vec<f32> = (0..60).map(|i| if i == 7 { 1e6 } else { -0.25 * (i % 16) as f32 - 0.01 }).collect();
    cuda.write(part, &values).unwrap();
    let mut read = vec![0.0; 60];
    cuda.read(part, &mut read).unwrap();
    let want: Vec<f32> = (0..60).map(|i| if i == 7 { 112.0 } else { -0.25 * (i % 16) as f32 }).collect();
    // Codes next to zero are closer to each other.
    for (i, (got, want)) in read.iter().zip(&want).enumerate() {
        assert!(if i % 16 == 0 { (got + 0.01).abs() < 0.001 } else { got == want }, "{i}: {got}, not {want}");
    }
    let mut around = vec![0.0; 120];
    cuda.read(whole, &mut around).unwrap();
    assert!(around.iter().enumerate().all(|(i, v)| (5..25).contains(&(i % 40)) || *v == 1.0));
}

/// The host writes the same bytes as the CPU backend, into slices of a matrix whose scale tiles contain further rows and blocks.
#[test]
fn the_host_writes_and_reads_nvfp4() {
    needs_emulator!();
    let (mut cuda, mut cpu, mut arena) = (cuda(), Cpu::new(1, Arc::default()).unwrap(), Arena::new(Region::Arena));
    let whole = arena.alloc_stored(150, 208, Stored::nvfp4(scale(0.25))).unwrap();
    let part = whole.rows(0..37).cols(64..144);
    let values = |t: Tensor, seed: usize| -> Vec<f32> {
        (0..t.len()).map(|i| ((i * 31 + seed) % 4093) as f32 / 64.0 - 30.0 * (1 + i / 16 % 3) as f32).collect()
    };
    for backend in [&mut cuda as &mut dyn Backend, &mut cpu] {
        backend.reserve(Region::Arena, arena.peak()).unwrap();
        // The padding of tiles is compared, too.
        whole.as_bytes().for_each(|view| backend.write(view, &vec![119.0; view.len()]).unwrap());
        backend.write(whole, &values(whole, 5)).unwrap();
        backend.write(part, &values(part, 17)).unwrap();
        backend.write(whole.rows(0..0), &[]).unwrap();
    }
    for view in whole.as_bytes() {
        let mut bytes = [vec![0; view.len()], vec![0; view.len()]];
        cuda.read_bytes(view, &mut bytes[0]).unwrap();
        cpu.read_bytes(view, &mut bytes[1]).unwrap();
        assert!(bytes[0] == bytes[1], "{view:?}");
    }
    for t in [whole, part, whole.rows(128..150), whole.cols(192..208)] {
        let mut read = [vec![0.0; t.len()], vec![0.0; t.len()]];
        cuda.read(t, &mut read[0]).unwrap();
        cpu.read(t, &mut read[1]).unwrap();
        assert_eq!(read[0], read[1], "{t:?}");
    }
    let values = vec![0.0; 96];
    assert!(what(cuda.write(part, &values)).starts_with("write: 96 values for"));
    assert!(what(cuda.read(part, &mut values.clone())).starts_with("read: 96 values from"));
}

/// NVFP4 elements cannot be NaN, so a NaN makes its block's scale NaN. Only that block is affected, wherever in it the value stands and
/// whichever kernel has stored it. An infinity becomes the largest value of the format.
#[test]
fn nan_is_kept_by_the_scale_of_its_block() {
    needs_emulator!();
    for (cols, dtype) in [(96, DType::F32), (1024, DType::Bf16)] {
        let (mut cuda, mut arena) = (cuda(), Arena::new(Region::Arena));
        let mut plain = |rows| arena.alloc(rows, cols, dtype).unwrap();
        let (x, shift, factor) = (plain(3), plain(1), plain(1));
        let out = arena.alloc_stored(3, cols, Stored::nvfp4(scale(0.25))).unwrap();
        cuda.reserve(Region::Arena, arena.peak()).unwrap();
        let values = |rows: usize| (0..rows * cols).map(|i| (i * 7 % 61) as f32 / 32.0 - 1.0).collect::<Vec<f32>>();
        cuda.write(x, &values(3)).unwrap();
        cuda.write(factor, &values(1)).unwrap();
        for (at, odd) in (0..16).flat_map(|i| [(16 + i, f32::NAN), (48 + i, f32::NEG_INFINITY)]) {
            let mut added = values(1);
            added[at] = odd;
            cuda.write(shift, &added).unwrap();
            cuda.run(Op::LayerNormModulate { streams: &[Modulated { out, x, shift, scale: factor }], eps: 1e-6 }).unwrap();
            let mut read = vec![0.0; out.len()];
            cuda.read(out, &mut read).unwrap();
            for (i, value) in read.into_iter().enumerate() {
                let right = match odd.is_nan() {
                    true => value.is_nan() == (i % cols / 16 == at / 16),
                    // Six times the largest block scale times the tensor's scale.
                    false => value.is_finite() && (i % cols != at || value == -6.0 * 448.0 * 0.25),
                };
                assert!(right, "{odd} in column {at}: [{}, {}] is {value}", i / cols, i % cols);
            }
        }
    }
}

#[test]
fn formats_without_kernels_are_refused() {
    needs_emulator!();
    let (mut cuda, mut arena) = (cuda(), Arena::new(Region::Arena));
    let mut alloc = |stored| arena.alloc_stored(4, 64, stored).unwrap();
    let [q, k, out] = [DType::Bf16; 3].map(|dtype| alloc(Stored::plain(dtype)));
    let (v, fp4) = (alloc(Stored::fp8(Scale::ONE)), alloc(Stored::nvfp4(Scale::ONE)));
    cuda.reserve(Region::Arena, arena.peak()).unwrap();
    let attend = |cuda: &mut Cuda, out: Tensor, v: Tensor| {
        let softmax = Softmax::Natural { scale: 0.125 };
        what(cuda.run(Op::Attention { out: &[out], q, kv: &[KvSegment { k, v }], head_dim: 64, causal: false, softmax }))
    };
    let values = attend(&mut cuda, out, v);
    assert!(values.contains("the values of attention are not quantized"), "{values}");
    // A layer that multiplies NVFP4 inputs has only NVFP4 weights.
    let mut weights = Arena::new(Region::Weights);
    let weight = Weight::stack(&[weights.alloc_stored(8, 64, Stored::fp8(Scale::ONE)).unwrap()]).unwrap();
    cuda.reserve(Region::Weights, weights.peak()).unwrap();
    let w = Linear { id: None, weight, bias: None, input: Stored::nvfp4(Scale::ONE), lora: None };
    let product = what(cuda.run(Op::Linear(&[Gemm { out: out.cols(0..8), x: fp4, w: &w }])));
    assert!(product.contains("cannot be multiplied on the GPU"), "{product}");
}
