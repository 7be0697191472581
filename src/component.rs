//! The parts of a model that have weights, and a container with one value for each part, accessed by name instead of position.

use std::fmt;
use std::ops::{Index, IndexMut};

/// One of the three networks of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Component {
    /// The denoising transformer.
    Transformer,
    /// The text encoder, a Qwen3.
    TextEncoder,
    /// The VAE.
    Vae,
}

impl Component {
    /// All parts, in the order in which they are opened and named.
    pub const ALL: [Self; 3] = [Self::Transformer, Self::TextEncoder, Self::Vae];
}

impl fmt::Display for Component {
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
pub struct PerComponent<T> {
    /// The value of the transformer.
    pub transformer: T,
    /// The value of the text encoder.
    pub text_encoder: T,
    /// The value of the VAE.
    pub vae: T,
}

impl<T> PerComponent<T> {
    /// Computes the value of each part, in the order of [`Component::ALL`].
    pub fn from_fn(mut value: impl FnMut(Component) -> T) -> Self {
        let [transformer, text_encoder, vae] = Component::ALL.map(&mut value);
        Self { transformer, text_encoder, vae }
    }

    /// Computes the value of each part, in the order of [`Component::ALL`], and stops at the first error.
    pub fn try_from_fn<E>(mut value: impl FnMut(Component) -> Result<T, E>) -> Result<Self, E> {
        Ok(Self {
            transformer: value(Component::Transformer)?,
            text_encoder: value(Component::TextEncoder)?,
            vae: value(Component::Vae)?,
        })
    }

    /// Applies `change` to each value.
    pub fn map<U>(self, mut change: impl FnMut(T) -> U) -> PerComponent<U> {
        PerComponent { transformer: change(self.transformer), text_encoder: change(self.text_encoder), vae: change(self.vae) }
    }

    /// The values by reference.
    pub fn each_ref(&self) -> PerComponent<&T> {
        PerComponent { transformer: &self.transformer, text_encoder: &self.text_encoder, vae: &self.vae }
    }

    /// The parts and their values, in the order of [`Component::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Component, &T)> {
        Component::ALL.into_iter().map(|part| (part, &self[part]))
    }

    /// The values in the order of [`Component::ALL`].
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.iter().map(|(_, value)| value)
    }
}

impl<T> Index<Component> for PerComponent<T> {
    type Output = T;

    fn index(&self, part: Component) -> &T {
        match part {
            Component::Transformer => &self.transformer,
            Component::TextEncoder => &self.text_encoder,
            Component::Vae => &self.vae,
        }
    }
}

impl<T> IndexMut<Component> for PerComponent<T> {
    fn index_mut(&mut self, part: Component) -> &mut T {
        match part {
            Component::Transformer => &mut self.transformer,
            Component::TextEncoder => &mut self.text_encoder,
            Component::Vae => &mut self.vae,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_follow_their_parts() {
        let names = PerComponent::from_fn(|part| part.to_string());
        assert_eq!(
            (names.transformer.as_str(), names.text_encoder.as_str(), names.vae.as_str()),
            ("transformer", "text encoder", "vae")
        );
        assert!(names.iter().all(|(part, name)| part.to_string() == *name && names[part] == *name));
        assert_eq!(names.values().collect::<Vec<_>>(), ["transformer", "text encoder", "vae"]);
        let mut lengths = names.each_ref().map(String::len);
        assert_eq!(lengths, PerComponent { transformer: 11, text_encoder: 12, vae: 3 });
        lengths[Component::Vae] += 1;
        assert_eq!(lengths.vae, 4);
    }

    #[test]
    fn try_from_fn_stops_at_the_first_error() {
        let mut asked = Vec::new();
        let result = PerComponent::try_from_fn(|part| {
            asked.push(part);
            if part == Component::TextEncoder { Err(part) } else { Ok(()) }
        });
        assert_eq!((result, asked), (Err(Component::TextEncoder), vec![Component::Transformer, Component::TextEncoder]));
        assert_eq!(PerComponent::try_from_fn(Ok::<Component, ()>), Ok(PerComponent::from_fn(|part| part)));
    }
}
