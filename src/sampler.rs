//! The sigma schedule of a run, and the timestep embedding of the transformer.
//!
//! The models are trained by flow matching (rectified flow, Liu et al. 2022): sampling integrates the predicted velocity from
//! noise (`sigma` = 1) to the image (`sigma` = 0) in a few Euler steps. The steps are not uniform: the schedule is shifted so
//! that larger images spend more of them at high noise, where the composition is decided. The exponential time shift has one
//! parameter, `mu`.

use crate::error::{Error, Result};
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// Length of [`timestep_embedding`].
pub const TIMESTEP_CHANNELS: usize = 256;

/// For canvases with more tokens than this, `mu` follows the 200-step line for any number of steps.
const LARGE_CANVAS: usize = 4300;

/// The empirical shift of the schedule, for a number of steps and of canvas tokens (reference tokens do not count).
///
/// `mu` is linear in the tokens, with one fitted line for 10 and one for 200 steps, and is interpolated linearly between the two.
/// It has a discontinuity at 4300 tokens, which the models were tuned with and which is therefore kept.
pub fn mu(steps: usize, tokens: usize) -> f64 {
    let tokens_f = tokens as f64;
    let at_200 = 0.00016927 * tokens_f + 0.45666666;
    if tokens > LARGE_CANVAS {
        return at_200;
    }
    let at_10 = 8.73809524e-05 * tokens_f + 1.89833333;
    let slope = (at_200 - at_10) / 190.0;
    slope * steps as f64 + (at_200 - 200.0 * slope)
}

/// Noise levels before each step. A schedule shifts them in place of evenly spaced ones.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sigmas(Vec<f64>);

impl Sigmas {
    /// The noise levels that the Turbo adapter of FLUX.2 \[dev\] was trained for, as its publisher states them.
    pub const TURBO: [f64; 8] = [1.0, 0.6509, 0.4374, 0.2932, 0.1893, 0.1108, 0.0495, 0.00031];

    /// The maximum number of levels.
    const MOST: usize = 1000;

    /// The lowest level, and the smallest distance of two. Steps are computed in f32, which still tells such levels from zero.
    const LEAST: f64 = 1e-6;

    /// Makes a list of levels from at most 1 to at least 0.000001. Each is below the one before it.
    pub fn new(levels: &[f64]) -> Result<Self> {
        // One tenth is left for the rounding of differences.
        let falls = levels.windows(2).all(|pair| pair[0] - pair[1] >= 0.9 * Self::LEAST);
        let within = levels.iter().all(|level| *level >= Self::LEAST && *level <= 1.0);
        if !(1..=Self::MOST).contains(&levels.len()) || !falls || !within {
            let what = "noise levels have to fall, from at most 1 to at least 0.000001, by at least that much each";
            return Err(Error::usage(what, "write `turbo`, or levels with commas between: 1,0.75,0.5,0.25"));
        }
        Ok(Self(levels.to_vec()))
    }

    /// The number of steps.
    pub fn steps(&self) -> usize {
        self.0.len()
    }
}

impl FromStr for Sigmas {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "turbo" {
            return Self::new(&Self::TURBO);
        }
        let levels: Option<Vec<f64>> = text.split(',').map(|level| level.trim().parse().ok()).collect();
        Self::new(&levels.unwrap_or_default())
    }
}

impl fmt::Display for Sigmas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let levels: Vec<String> = self.0.iter().map(f64::to_string).collect();
        f.write_str(&levels.join(","))
    }
}

/// The sigmas of a run: the noise level before each step, and after the last one.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// The levels of a whole run before they are shifted, one per step.
    levels: Vec<f64>,
    /// The parameter of the shift. It belongs to the steps of a whole run.
    mu: f64,
    sigmas: Vec<f32>,
}

impl Schedule {
    /// The schedule for a canvas of `tokens` tokens. It starts at exactly 1 and ends at exactly 0.
    pub fn new(steps: usize, tokens: usize) -> Self {
        Self::whole((0..steps).map(|i| 1.0 - i as f64 / steps as f64).collect(), tokens)
    }

    /// The schedule with these levels in place of evenly spaced ones.
    pub fn of(sigmas: &Sigmas, tokens: usize) -> Self {
        Self::whole(sigmas.0.clone(), tokens)
    }

    fn whole(levels: Vec<f64>, tokens: usize) -> Self {
        let mu = mu(levels.len(), tokens);
        let sigmas = shifted(mu, &levels);
        Self { levels, mu, sigmas }
    }

    /// The last `strength` of the run: it begins at a lower noise level and takes as many of the steps, rounded up. A strength is not rounded
    /// to whole steps, because a run may have only four.
    pub fn begin(mut self, strength: f64) -> Self {
        let all = self.levels.len();
        let part = all as f64 * strength;
        let steps = ((part - Self::EXACT).ceil() as usize).clamp(1.min(all), all);
        let level = |place: f64| {
            let near = place.round();
            if (place - near).abs() < Self::EXACT {
                return self.levels[near as usize];
            }
            let (low, high) = (self.levels[place as usize], self.levels.get(place as usize + 1).copied().unwrap_or(0.0));
            low + place.fract() * (high - low)
        };
        let levels: Vec<f64> = (0..steps).map(|i| level(all as f64 - part * (1.0 - i as f64 / steps as f64))).collect();
        self.sigmas = shifted(self.mu, &levels);
        self
    }

    /// How far from a whole number a number of steps is taken for one: 50 times 0.56 is 28.000000000000004.
    const EXACT: f64 = 1e-9;

    /// The parameter of the shift.
    pub fn mu(&self) -> f64 {
        self.mu
    }

    /// Number of steps that run.
    pub fn steps(&self) -> usize {
        self.sigmas.len() - 1
    }

    /// Noise level before step `i`, which is also the transformer's timestep; `sigma(steps())` is 0.
    ///
    /// # Panics
    /// If `i` is larger than [`Schedule::steps`]: a bug in the caller.
    pub fn sigma(&self, i: usize) -> f32 {
        self.sigmas[i]
    }

    /// Change of sigma in step `i`, by which the velocity is multiplied; it is negative.
    ///
    /// # Panics
    /// If there is no step `i`: a bug in the caller.
    pub fn dt(&self, i: usize) -> f32 {
        self.sigmas[i + 1] - self.sigmas[i]
    }
}

/// Shifted levels, and zero after the last.
fn shifted(mu: f64, levels: &[f64]) -> Vec<f32> {
    let shift = mu.exp();
    let shifted = levels.iter().map(|level| (shift / (shift + (1.0 / level - 1.0))) as f32);
    shifted.chain([0.0]).collect()
}

/// The sinusoidal embedding of a timestep in `0..=1`: 128 cosines, then 128 sines, with frequencies from 1000 down to about 0.1
/// per unit.
///
/// Every operation is rounded to f32, as in the reference implementation: there an angle near 1000 is off by up to 3e-5, and the
/// models were trained with these values.
pub fn timestep_embedding(t: f32) -> [f32; TIMESTEP_CHANNELS] {
    const HALF: usize = TIMESTEP_CHANNELS / 2;
    let tau = 1000.0 * t;
    let exponent = -(10_000f64.ln() as f32);
    let mut out = [0.0; TIMESTEP_CHANNELS];
    for i in 0..HALF {
        let frequency = (exponent * i as f32 / HALF as f32).exp();
        let angle = tau * frequency;
        out[i] = angle.cos();
        out[HALF + i] = angle.sin();
    }
    out
}

/// The embeddings of all timesteps of a schedule, one row each. The row after the last step is time zero, at which cached
/// references are encoded.
pub fn timestep_embeddings(schedule: &Schedule) -> Vec<f32> {
    schedule.sigmas.iter().flat_map(|&t| timestep_embedding(t)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, want: f64, tolerance: f64, what: &str) {
        assert!((got - want).abs() <= tolerance, "{what}: {got} is not {want}");
    }

    #[test]
    fn levels_of_the_turbo_adapter_are_shifted_like_even_ones() {
        let sigmas: Sigmas = "turbo".parse().unwrap();
        let schedule = Schedule::of(&sigmas, 4096);
        let want = [1.0, 0.947394, 0.882484, 0.800272, 0.692818, 0.546192, 0.334673, 0.002986, 0.0];
        assert_eq!(schedule.steps(), 8);
        want.iter().enumerate().for_each(|(i, want)| close(schedule.sigma(i).into(), *want, 1e-6, "turbo"));
        let even: Sigmas = "1, 0.75,0.5,0.25".parse().unwrap();
        assert_eq!(Schedule::of(&even, 4096), Schedule::new(4, 4096));
        assert_eq!(even.to_string(), "1,0.75,0.5,0.25");
        assert_eq!(sigmas.to_string().parse::<Sigmas>().unwrap(), sigmas);
        for wrong in [
            "",
            "1,1",
            "0.5,0.6",
            "1,0",
            "1.5,1",
            "nan",
            "1,nan",
            "1,0.5,",
            "Turbo",
            "-1",
            "1e-300",
            "1,9.9e-7",
            "0.5,0.4999999999",
        ] {
            assert_eq!(wrong.parse::<Sigmas>().unwrap_err().exit_code(), 2, "{wrong}");
        }
        assert!(Sigmas::new(&[]).is_err());
        assert_eq!("1,0.000002,0.000001".parse::<Sigmas>().unwrap().steps(), 3);
        // Every step changes the latents.
        let least = Schedule::of(&Sigmas::new(&[1.0, 2e-6, 1e-6]).unwrap(), 16);
        assert!((0..3).all(|i| least.dt(i) < 0.0), "{least:?}");
    }

    #[test]
    fn schedules_of_dev() {
        for (tokens, steps, want) in [
            (1024, 20, 1.91634762),
            (1024, 50, 1.70195621),
            (4080, 28, 2.14992094),
            (4096, 20, 2.19802207),
            (4096, 50, 2.02335116),
            (9216, 28, 2.01665898),
            (16_384, 50, 3.22998634),
        ] {
            close(mu(steps, tokens), want, 1e-8, "mu");
        }
        let sigmas = Schedule::new(28, 4096);
        for (i, want) in [(0, 1.0), (1, 0.995710), (3, 0.986234), (24, 0.588964), (27, 0.241515), (28, 0.0)] {
            close(sigmas.sigma(i).into(), want, 1e-6, "sigma");
        }
    }

    #[test]
    fn four_step_schedules_of_common_sizes() {
        let table: [(usize, f64, [f64; 3]); 8] = [
            (256, 1.965567, [0.955391, 0.877134, 0.704112]),
            (1024, 2.030690, [0.958085, 0.883982, 0.717497]),
            (2304, 2.139227, [0.962234, 0.894658, 0.738969]),
            (4080, 2.289823, [0.967341, 0.908031, 0.766958]),
            (4096, 2.291180, [0.96738399, 0.90814392, 0.76719996]),
            (5440, 1.377495, [0.922450, 0.798588, 0.569272]),
            (9216, 2.016659, [0.957518, 0.882535, 0.714644]),
            (16_384, 3.229986, [0.986986, 0.961947, 0.893915]),
        ];
        for (tokens, want_mu, sigmas) in table {
            close(mu(4, tokens), want_mu, 1e-6, "mu");
            let schedule = Schedule::new(4, tokens);
            assert_eq!((schedule.steps(), schedule.sigma(0), schedule.sigma(4)), (4, 1.0, 0.0));
            for (i, want) in sigmas.into_iter().enumerate() {
                close(f64::from(schedule.sigma(i + 1)), want, 1e-6, &format!("{tokens} tokens, sigma {}", i + 1));
            }
        }
    }

    #[test]
    fn the_default_canvas_to_the_last_digit() {
        let schedule = Schedule::new(4, 4096);
        for (i, want) in [1.0, 0.96738399, 0.90814392, 0.76719996, 0.0].into_iter().enumerate() {
            close(f64::from(schedule.sigma(i)), want, 1e-7, "sigma");
        }
        for (i, want) in [-0.032616, -0.059240, -0.140944, -0.767200].into_iter().enumerate() {
            close(f64::from(schedule.dt(i)), want, 1e-6, "dt");
        }
    }

    #[test]
    fn fifty_steps() {
        for (tokens, want) in [
            (256, 1.621607),
            (1024, 1.701956),
            (2304, 1.835871),
            (4096, 2.023351),
            (5440, 1.377495),
            (9216, 2.016659),
            (16_384, 3.229986),
        ] {
            close(mu(50, tokens), want, 1e-6, "mu");
        }
        let schedule = Schedule::new(50, 4096);
        let want = [(0, 1.0), (1, 0.99730906), (2, 0.99452136), (47, 0.32559333), (48, 0.23963117), (49, 0.13371896), (50, 0.0)];
        for (i, want) in want {
            close(f64::from(schedule.sigma(i)), want, 1e-7, &format!("sigma {i}"));
        }
    }

    #[test]
    fn mu_jumps_past_4300_tokens() {
        close(mu(4, 4300), 2.308, 5e-4, "mu");
        close(mu(4, 4301), 1.185, 5e-4, "mu");
        assert_eq!(mu(4, 4301), mu(50, 4301));
    }

    #[test]
    fn extreme_numbers_of_steps() {
        assert_eq!(Schedule::new(1, 4096).sigmas, [1.0, 0.0]);
        assert_eq!(Schedule::new(0, 4096).steps(), 0);
        let long = Schedule::new(1000, 4096);
        assert!((0..1000).all(|i| long.dt(i) < 0.0), "noise falls with every step");
    }

    #[test]
    fn a_strength_begins_between_steps() {
        let of = |strength| Schedule::new(4, 4096).begin(strength);
        for (strength, steps, sigma) in [
            (0.1, 1, 0.523),
            (0.25, 1, 0.767),
            (0.3, 2, 0.809),
            (0.5, 2, 0.908),
            (0.6, 3, 0.937),
            (0.75, 3, 0.967),
            (0.8, 4, 0.975),
            (1.0, 4, 1.0),
        ] {
            let schedule = of(strength);
            assert_eq!(schedule.steps(), steps, "{strength}");
            close(schedule.sigma(0).into(), sigma, 5e-4, "the first sigma");
            assert!((0..steps).all(|i| schedule.dt(i) < 0.0) && schedule.sigma(steps) == 0.0);
        }
        assert_eq!(of(1.0), Schedule::new(4, 4096));
        // Whole steps are the tail of the whole run, to the bit; also where the product is just above a whole number.
        let whole = Schedule::new(50, 4096);
        for steps in 1..=50 {
            let tail = whole.clone().begin(steps as f64 / 50.0);
            assert_eq!(tail.sigmas, whole.sigmas[50 - steps..], "{steps}");
            assert_eq!(tail.mu(), whole.mu());
        }
        let turbo = Schedule::of(&Sigmas::new(&Sigmas::TURBO).unwrap(), 4096);
        assert_eq!(turbo.clone().begin(0.375).sigmas, turbo.sigmas[5..]);
        // Eight tenths of the last listed level, below which there is only zero.
        let last = turbo.begin(0.1);
        assert_eq!(last.steps(), 1);
        close(last.sigma(0).into(), 0.002390, 1e-6, "the last level");
    }

    #[test]
    fn timestep_embedding_puts_cosines_first() {
        let embedding = timestep_embedding(1.0);
        for (i, want) in [(0, 0.562379), (1, 0.789627), (2, 0.439928), (128, 0.826880), (129, 0.613588), (130, -0.898033)] {
            close(f64::from(embedding[i]), want, 1e-6, &format!("element {i}"));
        }
        let zero = timestep_embedding(0.0);
        assert!(zero[..128].iter().all(|&c| c == 1.0) && zero[128..].iter().all(|&s| s == 0.0));
    }
}
