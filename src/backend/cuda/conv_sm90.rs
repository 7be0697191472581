//! 3x3 convolutions on Hopper: implicit GEMMs, with the tiles and schedules of GEMMs.

use super::abi::{self, KlGemmRows, KlGemmStream, KlMat, KlOutputRange};
use super::context::{KernelChoice, OpContext};
use super::gemm::{NO_MAPS, NO_PART, NO_ROWS, NO_STREAM, store_cols};
use super::launch::Kernel;
use super::norm::group_stats;
use super::params::{NO_MAP, NONE, Pixels, is_async_copyable};
use super::select::{GemmOperands, GemmPlan, GemmShape, GroupedGemm, Tile};
use crate::backend::Shortcut;
use crate::error::Result;

/// A 1x1 convolution of another image that is added to the result.
#[derive(Clone, Copy)]
pub struct ShortcutMats {
    x: KlMat,
    w: KlMat,
    bias: KlMat,
}

impl ShortcutMats {
    /// The operands of a shortcut that is a plain layer: one matrix, with or without a bias.
    pub fn new(cx: &OpContext, op: &'static str, Shortcut { x, w }: Shortcut<'_>) -> Result<Option<Self>> {
        match w.weight.parts() {
            &[part] if w.lora.is_none() => {
                Ok(Some(Self { x: cx.mat(x, op)?, w: cx.mat(part, op)?, bias: cx.mat_if(w.bias, op)? }))
            }
            _ => Ok(None),
        }
    }
}

/// A convolution as a GEMM.
pub struct ConvGemm<'a> {
    /// Operands of the convolution.
    p: &'a abi::KlConv,
    shortcut: Option<ShortcutMats>,
    plan: GemmPlan,
    tiles: ImageTiles,
}

/// The tiles of an output image. With upsampling, the tiles of one phase of its pixels.
#[derive(Clone, Copy)]
struct ImageTiles {
    width: u32,
    height: u32,
    across: u32,
    down: u32,
}

/// Phases of output pixels, each with filters of its own. An upsampled image has one for each parity of column and line.
const fn phases(p: &abi::KlConv) -> u32 {
    if p.sampling == abi::KL_UP { 4 } else { 1 }
}

/// Taps of a filter.
const fn taps(p: &abi::KlConv) -> u32 {
    if p.sampling == abi::KL_UP { 4 } else { 9 }
}

/// A filter tap: its index in the filter, the image plane that it reads, and its column and line in that plane's window in phase 0.
/// Phases for right or lower pixels begin one pixel later.
struct Tap {
    filter: u32,
    plane: u32,
    at: [u32; 2],
}

/// The taps in the order of multiplication. Taps that read the same window follow each other.
fn tap_order(p: &abi::KlConv) -> Vec<Tap> {
    let (order, side, by): (&[u32], _, _) = match p.sampling {
        abi::KL_UP => (&[0, 1, 2, 3], 2, 1),
        // Taps on even lines and columns come first, then taps with an odd column, line or both.
        abi::KL_DOWN => (&[0, 2, 6, 8, 1, 7, 3, 5, 4], 3, 2),
        _ => (&[0, 1, 2, 3, 4, 5, 6, 7, 8], 3, 1),
    };
    let tap = |&filter: &u32| {
        let (x, y) = (filter % side, filter / side);
        Tap { filter, plane: y % by * 2 + x % by, at: [x / by, y / by] }
    };
    order.iter().map(tap).collect()
}

/// Packs values of `bits` bits each, the first in the lowest bits.
fn packed(bits: usize, values: impl Iterator<Item = u32>) -> u64 {
    values.enumerate().map(|(i, value)| u64::from(value) << (i * bits)).sum()
}

/// K-blocks that hold `channels` channels.
const fn channel_blocks(channels: u32, tile: Tile) -> u32 {
    channels.div_ceil(tile.block_k)
}

/// The number of leading k-blocks in which odd channel blocks are empty in their upper half. It covers all taps if a tap has two channel
/// blocks and at most one and a half of channels.
const fn half_blocks(p: &abi::KlConv, tile: Tile) -> u32 {
    let channels = p.x.cols;
    if channels > tile.block_k && 2 * channels <= 3 * tile.block_k { taps(p) * 2 } else { 0 }
}

fn image_tiles(p: &abi::KlConv, tile: Tile) -> ImageTiles {
    let by = if p.sampling == abi::KL_DOWN { 2 } else { 1 };
    let (width, height) = (p.width / by, p.height / by);
    let (across, lines) = (width.div_ceil(abi::KL_CONV_TILE_WIDTH), tile.block_m / abi::KL_CONV_TILE_WIDTH);
    ImageTiles { width, height, across, down: height.div_ceil(lines) }
}

fn k_blocks(p: &abi::KlConv, shortcut: Option<ShortcutMats>, tile: Tile) -> u32 {
    taps(p) * channel_blocks(p.x.cols, tile) + shortcut.map_or(0, |shortcut| channel_blocks(shortcut.x.cols, tile))
}

/// The pixels of an image, or of one of its phases. The upper bit of a phase is the parity of lines, the lower one of columns.
fn pixels(size: [u32; 2], phase: Option<u32>) -> Pixels {
    match phase {
        Some(phase) => Pixels { size, step: 2, first: [phase % 2, phase / 2] },
        None => Pixels { size, step: 1, first: [0, 0] },
    }
}

impl<'a> ConvGemm<'a> {
    /// Selects a tile and a schedule, if a kernel takes these operands.
    pub fn new(cx: &OpContext, p: &'a abi::KlConv, shortcut: Option<ShortcutMats>) -> Option<Self> {
        let copyable = |m: &KlMat| m.data == 0 || is_async_copyable(m, abi::KL_BF16);
        let operands = shortcut.map_or([NONE; 2], |shortcut| [shortcut.x, shortcut.w]);
        let residual = p.residual.data == 0 || p.sampling != abi::KL_UP;
        if ![p.out, p.x, p.w, p.residual].iter().chain(&operands).all(copyable) || !residual {
            return None;
        }
        let fits = |tile: &Tile| tile.operands == GemmOperands::Conv3x3 && cx.kernels.has(tile.kernel);
        let candidate = |tile: Tile, forced: bool| {
            let tiles = image_tiles(p, tile);
            let parts = vec![p.out.cols; phases(p) as usize];
            let shapes = [GemmShape { m: tiles.across * tiles.down * tile.block_m, parts }];
            let gemm = GroupedGemm { shapes: &shapes, k: k_blocks(p, shortcut, tile) * tile.block_k, same_k: true };
            let plan = if forced { gemm.forced(tile, cx.sms) } else { gemm.plan(cx.sms, |other| other == tile)? };
            Some((gemm.cost(plan, cx.sms), Self { p, shortcut, plan, tiles }))
        };
        match cx.choice {
            KernelChoice::Naive => None,
            KernelChoice::Only(kernel) => candidate(Tile::of(kernel).filter(fits)?, true).map(|(_, gemm)| gemm),
            KernelChoice::Best => {
                let all = Tile::ALL.iter().copied().filter(fits).filter_map(|tile| candidate(tile, false));
                all.min_by_key(|(cost, _)| *cost).map(|(_, gemm)| gemm)
            }
        }
    }

    /// Row tiles of one phase, padded to whole clusters.
    fn row_tiles(&self) -> u32 {
        (self.tiles.across * self.tiles.down).next_multiple_of(abi::KL_SM90_CLUSTER)
    }

    /// Moments that the tiles store for each channel group, one from each consumer warpgroup.
    fn moments(&self) -> u32 {
        phases(self.p) * self.row_tiles() * self.plan.tile.consumers
    }

    /// Where tiles store their moments: behind the Stream-K partials. `None` if the kernel cannot compute moments of `groups` or there is
    /// no room for them.
    fn moments_address(&self, cx: &OpContext, groups: u32) -> Option<u64> {
        let Tile { block_m, block_n, .. } = self.plan.tile;
        let width = self.p.out.cols / groups;
        let has_moments = block_n.is_power_of_two() && width.is_power_of_two() && (2..=64).contains(&width);
        let used = u64::from(self.plan.schedule.workers * abi::KL_SM90_CLUSTER) * u64::from(block_m * block_n) * 4;
        let bytes = u64::from(self.moments()) * u64::from(groups) * 16;
        let fits =
            has_moments && block_n / width <= abi::KL_CONV_TILE_GROUPS && used + bytes <= cx.memory.stream_k_partial_bytes();
        fits.then(|| cx.memory.stream_k_partials() + used)
    }

    fn stream(&self) -> KlGemmStream {
        let (p, Tile { block_n, .. }) = (self.p, self.plan.tile);
        let mut stream = KlGemmStream { x: p.x, bias: p.bias, ..NO_STREAM };
        let (tiles, epilogue) =
            (p.out.cols.div_ceil(block_n), if p.residual.data == 0 { abi::KL_STORE } else { abi::KL_GATE_RESIDUAL });
        for (matrix, part) in (0..phases(p)).zip(&mut stream.part) {
            let rows = KlGemmRows { matrix, dtype: abi::KL_BF16, ..NO_ROWS };
            *part = KlOutputRange { out: p.out, w: [rows, NO_ROWS], epilogue, tiles, ..NO_PART };
        }
        let rows = self.row_tiles() * self.plan.tile.block_m;
        (stream.row_tiles, stream.col_tiles) = self.plan.tile.tile_counts(rows, tiles * phases(p));
        stream
    }

    /// Launches the convolution, and the kernels for the statistics of its result if they are wanted.
    pub fn launch(&self, cx: &OpContext, op: &'static str, stats: Option<KlMat>) -> Result<()> {
        let (p, tiles, config) = (self.p, self.tiles, self.plan.tile);
        let Tile { block_m, block_n, block_k, kernel, .. } = config;
        let fused = stats.and_then(|stats| Some((stats, self.moments_address(cx, stats.rows)?)));
        let stream = self.stream();
        let k_blocks = k_blocks(p, self.shortcut, config);
        let order = tap_order(p);
        // All pixels of a window are in one plane.
        let starts = (0..order.len()).map(|i| u32::from(i == 0 || order[i].plane != order[i - 1].plane));
        let clusters = self.plan.schedule.persistent_clusters(stream.row_tiles * stream.col_tiles, self.plan.tile.slots(cx.sms));
        let mut params = abi::KlConvSm90 {
            gemm: abi::KlGemmTma {
                x: [NO_MAP; _],
                w: [NO_MAPS; _],
                out: [NO_MAPS; _],
                residual: [NO_MAP; _],
                down_out: [NO_MAP; _],
                up: [NO_MAP; _],
                stream: [stream, NO_STREAM],
                expansion: abi::KlExpansion { counters: 0, to: [[0; _]; _], units: 0, tiles: 0 },
                // Column tiles of the same pixels run at the same time.
                group: [1; _],
                schedule: cx.tile_schedule(self.plan.schedule, stream.row_tiles * stream.col_tiles, k_blocks),
                saturated: cx.memory.saturated(),
                unused: [0; _],
            },
            image: abi::KlConvImage {
                plane: [NO_MAP; _],
                shortcut: NO_MAP,
                shortcut_bias: self.shortcut.map_or(NONE, |shortcut| shortcut.bias),
                partials: fused.map_or(0, |(_, address)| address),
                tap_rows: packed(6, order.iter().map(|tap| tap.at[1] * abi::KL_CONV_WINDOW_WIDTH + tap.at[0])),
                tap_filters: packed(4, order.iter().map(|tap| tap.filter)),
                tap_planes: packed(2, order.iter().map(|tap| tap.plane)) as u32,
                window_starts: packed(1, starts) as u32,
                origin: if p.sampling == abi::KL_DOWN { 0 } else { -1 },
                groups: stats.map_or(0, |stats| stats.rows),
                width: tiles.width,
                height: tiles.height,
                tiles_across: tiles.across,
                channels: p.x.cols,
                taps: taps(p),
                tap_blocks: taps(p) * channel_blocks(p.x.cols, config),
                half_blocks: half_blocks(p, config),
                unused: [0; _],
            },
        };
        let (gemm, image) = (&mut params.gemm, &mut params.image);
        let lines = |rows: u32| rows / abi::KL_CONV_TILE_WIDTH;
        let window = [block_k, abi::KL_CONV_WINDOW_WIDTH, lines(block_m) + 2];
        let size = [p.width, p.height];
        match p.sampling {
            abi::KL_DOWN => {
                for (phase, plane) in (0..).zip(&mut image.plane) {
                    *plane = cx.image_map(&p.x, pixels(size, Some(phase)), window)?;
                }
            }
            _ => image.plane[0] = cx.image_map(&p.x, pixels(size, None), window)?,
        }
        // Columns that a warp stores at once.
        let stored = [
            store_cols(self.plan.tile, block_n, abi::KL_BF16),
            abi::KL_CONV_TILE_WIDTH,
            abi::KL_TMA_STORE_ROWS / abi::KL_CONV_TILE_WIDTH,
        ];
        let whole = pixels([tiles.width, tiles.height], None);
        if p.sampling == abi::KL_UP {
            // The filters of a phase are a range of columns of all filters.
            let cols = p.w.cols / phases(p);
            for (phase, (w, out)) in (0..).zip(gemm.w[0].iter_mut().zip(&mut gemm.out[0])) {
                let filters = KlMat { data: p.w.data + u64::from(phase * cols) * 2, cols, ..p.w };
                *w = cx.tensor_map(&filters, [block_k, block_n / 2])?;
                *out = cx.image_map(&p.out, pixels([2 * p.width, 2 * p.height], Some(phase)), stored)?;
            }
        } else {
            gemm.w[0][0] = cx.tensor_map(&p.w, [block_k, block_n / 2])?;
            gemm.out[0][0] = cx.image_map(&p.out, whole, stored)?;
        }
        if let Some(shortcut) = &self.shortcut {
            image.shortcut = cx.image_map(&shortcut.x, whole, window)?;
            gemm.w[0][1] = cx.tensor_map(&shortcut.w, [block_k, block_n / 2])?;
        }
        if p.residual.data != 0 {
            let rows = self.plan.tile.warpgroup_rows();
            gemm.residual[0] = cx.image_map(&p.residual, whole, [abi::KL_SM90_BOX_COLS, abi::KL_CONV_TILE_WIDTH, lines(rows)])?;
        }
        cx.kernels.launch(kernel, [clusters * kernel.cluster(), 1, 1], &params)?;
        match (stats, fused) {
            (None, _) => Ok(()),
            (Some(stats), None) => group_stats(cx, op, p.out, stats),
            (Some(stats), Some((_, partials))) => {
                let finish = abi::KlConv { stats, partials, row_tiles: self.moments(), groups: stats.rows, ..*p };
                cx.kernels.launch(Kernel::ConvStats, [stats.rows, 1, 1], &finish)
            }
        }
    }
}
