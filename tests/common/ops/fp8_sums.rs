//! The precision of tensor cores on e4m3: f64, except that sums of products keep thirteen binary places.

use super::oracle::{Real, bf16};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// Products that one step adds.
pub const STEP: usize = 32;
/// Binary places that a sum keeps (Hopper, without promotion; arXiv 2511.10909).
const PLACES: i32 = 13;

/// A value that adds products with the precision of tensor cores.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
pub struct Fp8Sums(pub f64);

macro_rules! operators {
    ($($trait:ident $f:ident),*) => {
        $(impl $trait for Fp8Sums {
            type Output = Self;
            fn $f(self, other: Self) -> Self {
                Self(self.0.$f(other.0))
            }
        })*
    };
}
operators!(Add add, Sub sub, Mul mul, Div div);

impl Neg for Fp8Sums {
    type Output = Self;
    fn neg(self) -> Self {
        Self(-self.0)
    }
}

impl AddAssign for Fp8Sums {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sum for Fp8Sums {
    fn sum<I: Iterator<Item = Self>>(values: I) -> Self {
        Self(values.map(|value| value.0).sum())
    }
}

/// The last place that a sum keeps, given its largest term, which is not zero.
fn last_place(largest: f64) -> f64 {
    2f64.powi(largest.abs().log2().floor() as i32 - PLACES)
}

/// Adds a step of products to a sum. Terms are aligned to the largest one. What is below the last place is cut off, also in the result.
pub fn add(sum: f64, products: &[f64]) -> f64 {
    let largest = products.iter().fold(sum.abs(), |most, term| most.max(term.abs()));
    if largest == 0.0 {
        return sum;
    }
    let cut = |value: f64, place: f64| (value / place).trunc() * place;
    let place = last_place(largest);
    let total = cut(sum, place) + products.iter().map(|&term| cut(term, place)).sum::<f64>();
    if total == 0.0 { 0.0 } else { cut(total, last_place(total)) }
}

impl Real for Fp8Sums {
    fn of(value: f32) -> Self {
        Self(value.into())
    }
    fn exp(self) -> Self {
        Self(self.0.exp())
    }
    fn sqrt(self) -> Self {
        Self(self.0.sqrt())
    }
    fn through_bf16(self) -> Self {
        Self(bf16(self.0 as f32).into())
    }

    fn add_products(sums: &mut [Self], row: &[Self], columns: &[Self]) {
        let cols = sums.len();
        for (i, sum) in sums.iter_mut().enumerate() {
            for step in (0..row.len()).step_by(STEP).map(|first| first..row.len().min(first + STEP)) {
                let products: Vec<f64> = step.map(|k| row[k].0 * columns[k * cols + i].0).collect();
                sum.0 = add(sum.0, &products);
            }
        }
    }
}
