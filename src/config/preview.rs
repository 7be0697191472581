//! The table that turns latents into the colors of a preview, without the VAE.

use serde_json::Value;

/// How much each channel of a normalized latent adds to red, green and blue within -1..1.
#[derive(Clone, Debug, PartialEq)]
pub struct PreviewTable(
    /// A row for each channel, and the bias in the last row.
    pub [[f32; 3]; Self::ROWS],
);

impl PreviewTable {
    /// Rows of a table: 32 channels and the bias.
    pub const ROWS: usize = 33;

    /// The largest magnitude of a value that a file may state.
    const LARGEST: f64 = 100.0;

    /// The table of FLUX.2's VAE. The numbers come from the project InvokeAI, which is licensed under the Apache License, Version 2.0:
    /// `FLUX2_LATENT_RGB_FACTORS` and `FLUX2_LATENT_RGB_BIAS` in invokeai/app/util/step_callback.py.
    pub const FLUX2: Self = Self([
        [0.0058, 0.0113, 0.0073],
        [0.0495, 0.0443, 0.0836],
        [-0.0099, 0.0096, 0.0644],
        [0.2144, 0.3009, 0.3652],
        [0.0166, -0.0039, -0.0054],
        [0.0157, 0.0103, -0.0160],
        [-0.0398, 0.0902, -0.0235],
        [-0.0052, 0.0095, 0.0109],
        [-0.3527, -0.2712, -0.1666],
        [-0.0301, -0.0356, -0.0180],
        [-0.0107, 0.0078, 0.0013],
        [0.0746, 0.0090, -0.0941],
        [0.0156, 0.0169, 0.0070],
        [-0.0034, -0.0040, -0.0114],
        [0.0032, 0.0181, 0.0080],
        [-0.0939, -0.0008, 0.0186],
        [0.0018, 0.0043, 0.0104],
        [0.0284, 0.0056, -0.0127],
        [-0.0024, -0.0022, -0.0030],
        [0.1207, -0.0026, 0.0065],
        [0.0128, 0.0101, 0.0142],
        [0.0137, -0.0072, -0.0007],
        [0.0095, 0.0092, -0.0059],
        [0.0000, -0.0077, -0.0049],
        [-0.0465, -0.0204, -0.0312],
        [0.0095, 0.0012, -0.0066],
        [0.0290, -0.0034, 0.0025],
        [0.0220, 0.0169, -0.0048],
        [-0.0332, -0.0457, -0.0468],
        [-0.0085, 0.0389, 0.0609],
        [-0.0076, 0.0003, -0.0043],
        [-0.0111, -0.0460, -0.0614],
        [-0.0329, -0.0718, -0.0851],
    ]);

    /// The table of a VAE whose encoder has these widths, if it is known. A VAE with another decoder may have the same latents.
    pub(super) const fn of_encoder(widths: [usize; 4]) -> Option<Self> {
        if matches!(widths, [128, 256, 512, 512]) { Some(Self::FLUX2) } else { None }
    }

    /// Reads the rows of a `kiln.json`.
    pub(super) fn of_json(value: &Value) -> Option<Self> {
        let number = |value: &Value| value.as_f64().filter(|v| v.abs() <= Self::LARGEST).map(|v| v as f32);
        let row = |row: &Value| row.as_array()?.iter().map(number).collect::<Option<Vec<f32>>>()?.try_into().ok();
        let rows: Vec<[f32; 3]> = value.as_array()?.iter().map(row).collect::<Option<_>>()?;
        rows.try_into().ok().map(Self)
    }

    /// All values, row by row.
    pub fn values(&self) -> &[f32] {
        self.0.as_flattened()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Configs;
    use serde_json::json;

    #[test]
    fn models_of_flux2_have_its_table() {
        for configs in [Configs::KLEIN_4B, Configs::KLEIN_9B, Configs::DEV] {
            assert_eq!(configs.vae.preview, Some(PreviewTable::FLUX2));
        }
        assert_eq!(Configs::TINY.vae.preview, None);
    }

    #[test]
    fn a_table_has_33_rows_of_three_numbers() {
        let rows = |count: usize| vec![json!([0.5, -1, 2.25]); count];
        assert_eq!(PreviewTable::of_json(&rows(33).into()), Some(PreviewTable([[0.5, -1.0, 2.25]; 33])));
        for count in [0, 32, 34] {
            assert_eq!(PreviewTable::of_json(&rows(count).into()), None, "{count} rows");
        }
        for row in [json!([1, 2]), json!([1, 2, 3, 4]), json!([1, 2, "3"]), json!([1, 2, 1e300]), json!(1)] {
            let mut rows = rows(33);
            rows[7] = row;
            assert_eq!(PreviewTable::of_json(&rows.into()), None);
        }
    }
}
