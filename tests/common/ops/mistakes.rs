//! Weights that do not fill their rows or lack scales: every backend refuses them.

use kiln::error::Error;
use kiln::internals::backend::{Backend, Role};
use kiln::internals::tensor::{Arena, Bytes, DType, Nvfp4Layout, Region, Scale, SliceScaling, WeightSlice};
use std::sync::Arc;

/// Checks that a backend takes whole slices and refuses incomplete ones when it expands them to bf16.
pub fn check(backend: &mut dyn Backend) {
    let mut arena = Arena::new(Region::Weights);
    let to = arena.alloc(4, 32, DType::Bf16).unwrap();
    backend.reserve(Region::Weights, 1 << 20).unwrap();
    let bytes = |count: usize| Bytes::new(Arc::new(vec![0u8; count]));
    let fp8 = |count, scales| WeightSlice {
        bytes: bytes(count),
        dtype: DType::E4m3,
        rows: 4,
        scaling: SliceScaling::Rows(bytes(scales)),
    };
    let nvfp4 = |count, scales, layout| {
        let scaling = SliceScaling::Blocks16 { scales: bytes(scales), tensor: Scale::ONE, layout };
        WeightSlice { bytes: bytes(count), dtype: DType::E2m1, rows: 4, scaling }
    };
    let (tiled, plain) = (Nvfp4Layout::COMFY, Nvfp4Layout::MODELOPT);
    for part in [fp8(128, 16), nvfp4(64, 512, tiled), nvfp4(64, 8, plain)] {
        backend.upload(to, Role::Linear, &[part]).unwrap();
    }
    let refused = [
        ("elements missing", fp8(127, 16)),
        ("a scale of a row missing", fp8(128, 12)),
        ("part of a scale", fp8(128, 15)),
        ("one scale too many", fp8(128, 20)),
        ("NVFP4 elements missing", nvfp4(63, 512, tiled)),
        ("no whole tile of scales", nvfp4(64, 511, tiled)),
        ("row-major scales in place of tiles", nvfp4(64, 8, tiled)),
        ("tiles in place of row-major scales", nvfp4(64, 512, plain)),
        ("a block scale missing", nvfp4(64, 7, plain)),
    ];
    for (what, part) in refused {
        let result = backend.upload(to, Role::Linear, &[part]);
        assert!(matches!(result, Err(Error::Op { op: "upload", .. })), "{what}: {result:?}");
    }
    // Blocks must be whole.
    let to = arena.alloc(4, 24, DType::Bf16).unwrap();
    let result = backend.upload(to, Role::Linear, &[nvfp4(48, 512, tiled)]);
    assert!(matches!(result, Err(Error::Op { op: "upload", .. })), "{result:?}");
}
