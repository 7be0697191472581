//! The sigma schedule of a run, and the timestep embedding of the transformer.
//!
//! The models are trained by flow matching (rectified flow, Liu et al. 2022): sampling integrates the predicted velocity from
//! noise (`sigma` = 1) to the image (`sigma` = 0) in a few Euler steps. The steps are not uniform: the schedule is shifted so
//! that larger images spend more of them at high noise, where the composition is decided. The exponential time shift has one
//! parameter, `mu`.

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

/// The sigmas of a run: the noise level before each step, and after the last one.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    sigmas: Vec<f32>,
}

impl Schedule {
    /// The schedule for a canvas of `tokens` tokens. It starts at exactly 1 and ends at exactly 0.
    pub fn new(steps: usize, tokens: usize) -> Self {
        let shift = mu(steps, tokens).exp();
        let shifted = (0..steps).map(|i| {
            let even = 1.0 - i as f64 / steps as f64;
            (shift / (shift + (1.0 / even - 1.0))) as f32
        });
        Self { sigmas: shifted.chain([0.0]).collect() }
    }

    /// Number of steps.
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
        assert_eq!(Schedule::new(1, 4096), Schedule { sigmas: vec![1.0, 0.0] });
        assert_eq!(Schedule::new(0, 4096).steps(), 0);
        let long = Schedule::new(1000, 4096);
        assert!((0..1000).all(|i| long.dt(i) < 0.0), "noise falls with every step");
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
