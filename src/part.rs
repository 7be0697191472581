//! The parts of a model that have weights, and one value for each of them, so that the three are told apart by name and not by
//! position.

use std::fmt;
use std::ops::{Index, IndexMut};

/// One of the three networks of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The denoising transformer.
    Transformer,
    /// The text encoder, a Qwen3.
    TextEncoder,
    /// The VAE.
    Vae,
}

impl Part {
    /// All parts, in the order in which they are opened and named.
    pub const ALL: [Self; 3] = [Self::Transformer, Self::TextEncoder, Self::Vae];
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Transformer => "transformer",
            Self::TextEncoder => "text encoder",
            Self::Vae => "vae",
        })
    }
}

/// A value for the transformer, one for the text encoder and one for the VAE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerPart<T> {
    /// The transformer's.
    pub transformer: T,
    /// The text encoder's.
    pub text_encoder: T,
    /// The VAE's.
    pub vae: T,
}

impl<T> PerPart<T> {
    /// Computes the value of each part, in the order of [`Part::ALL`].
    pub fn from_fn(mut value: impl FnMut(Part) -> T) -> Self {
        let [transformer, text_encoder, vae] = Part::ALL.map(&mut value);
        Self { transformer, text_encoder, vae }
    }

    /// Computes the value of each part, in the order of [`Part::ALL`], and stops at the first error.
    pub fn try_from_fn<E>(mut value: impl FnMut(Part) -> Result<T, E>) -> Result<Self, E> {
        Ok(Self { transformer: value(Part::Transformer)?, text_encoder: value(Part::TextEncoder)?, vae: value(Part::Vae)? })
    }

    /// Replaces each value by what `change` makes of it.
    pub fn map<U>(self, mut change: impl FnMut(T) -> U) -> PerPart<U> {
        PerPart { transformer: change(self.transformer), text_encoder: change(self.text_encoder), vae: change(self.vae) }
    }

    /// The values by reference.
    pub fn each_ref(&self) -> PerPart<&T> {
        PerPart { transformer: &self.transformer, text_encoder: &self.text_encoder, vae: &self.vae }
    }

    /// The parts and their values, in the order of [`Part::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Part, &T)> {
        Part::ALL.into_iter().map(|part| (part, &self[part]))
    }

    /// The values in the order of [`Part::ALL`].
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.iter().map(|(_, value)| value)
    }
}

impl<T> Index<Part> for PerPart<T> {
    type Output = T;

    fn index(&self, part: Part) -> &T {
        match part {
            Part::Transformer => &self.transformer,
            Part::TextEncoder => &self.text_encoder,
            Part::Vae => &self.vae,
        }
    }
}

impl<T> IndexMut<Part> for PerPart<T> {
    fn index_mut(&mut self, part: Part) -> &mut T {
        match part {
            Part::Transformer => &mut self.transformer,
            Part::TextEncoder => &mut self.text_encoder,
            Part::Vae => &mut self.vae,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_follow_their_parts() {
        let names = PerPart::from_fn(|part| part.to_string());
        assert_eq!(
            (names.transformer.as_str(), names.text_encoder.as_str(), names.vae.as_str()),
            ("transformer", "text encoder", "vae")
        );
        assert!(names.iter().all(|(part, name)| part.to_string() == *name && names[part] == *name));
        assert_eq!(names.values().collect::<Vec<_>>(), ["transformer", "text encoder", "vae"]);
        let mut lengths = names.each_ref().map(String::len);
        assert_eq!(lengths, PerPart { transformer: 11, text_encoder: 12, vae: 3 });
        lengths[Part::Vae] += 1;
        assert_eq!(lengths.vae, 4);
    }

    #[test]
    fn the_first_error_ends_it() {
        let mut asked = Vec::new();
        let result = PerPart::try_from_fn(|part| {
            asked.push(part);
            if part == Part::TextEncoder { Err(part) } else { Ok(()) }
        });
        assert_eq!((result, asked), (Err(Part::TextEncoder), vec![Part::Transformer, Part::TextEncoder]));
        assert_eq!(PerPart::try_from_fn(Ok::<Part, ()>), Ok(PerPart::from_fn(|part| part)));
    }
}
