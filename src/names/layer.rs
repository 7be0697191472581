//! Identifies layers of a transformer or a text encoder. A model's `load` assigns the identity, and later code uses it instead of a
//! name. Names are only for files and for messages.

use super::tables::{Captured, Row, fill};
use crate::component::Component;
use std::fmt;

/// A layer of a transformer or a text encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerId {
    /// The layer's role.
    pub role: LayerRole,
    /// The number of the layer's block, if it is in a block.
    pub block: Option<usize>,
}

/// One of the two streams of a double block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stream {
    /// The image stream.
    Image,
    /// The text stream.
    Text,
}

/// The role of a layer. Linear layers come first, in listing order, with layers of one [kind](Self::kind) next to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerRole {
    /// Queries, keys and values of a double block.
    Qkv(Stream),
    /// The output projection of a double block's attention.
    AttentionOut(Stream),
    /// Gate and up projection of a double block.
    MlpIn(Stream),
    /// Down projection of a double block.
    MlpOut(Stream),
    /// Queries, keys and values of a single block, and the gate and up projection of its MLP.
    Linear1,
    /// The output projection of a single block's attention and MLP.
    Linear2,
    /// The embedder of image tokens.
    ImageIn,
    /// The embedder of the prompt's embeddings.
    TextIn,
    /// The first layer of the timestep's embedder.
    TimeIn,
    /// The second layer of the timestep's embedder.
    TimeOut,
    /// The first layer of the guidance scale's embedder.
    GuidanceIn,
    /// The second layer of the guidance scale's embedder.
    GuidanceOut,
    /// The modulation of the image stream in double blocks.
    ImageModulation,
    /// The modulation of the text stream in double blocks.
    TextModulation,
    /// The modulation of single blocks.
    SingleModulation,
    /// The modulation after the last block.
    FinalModulation,
    /// The projection of image tokens to velocities.
    ImageOut,
    /// Queries, keys and values of a text encoder's layer.
    EncoderQkv,
    /// The output projection of a text encoder's attention.
    EncoderOut,
    /// Gate and up projection of a text encoder's MLP.
    EncoderGateUp,
    /// Down projection of a text encoder's MLP.
    EncoderDown,
    /// The table of token embeddings.
    TokenTable,
    /// The norm of queries in a double block.
    QueryNorm(Stream),
    /// The norm of keys in a double block.
    KeyNorm(Stream),
    /// The norm of queries in a single block.
    SingleQueryNorm,
    /// The norm of keys in a single block.
    SingleKeyNorm,
    /// The norm before a text encoder's attention.
    EncoderInputNorm,
    /// The norm of queries in a text encoder.
    EncoderQueryNorm,
    /// The norm of keys in a text encoder.
    EncoderKeyNorm,
    /// The norm before a text encoder's MLP.
    EncoderMlpNorm,
}

impl LayerRole {
    /// The layer of this role in a block.
    pub const fn of_block(self, block: usize) -> LayerId {
        LayerId { role: self, block: Some(block) }
    }

    /// The only layer of this role.
    pub const fn only(self) -> LayerId {
        LayerId { role: self, block: None }
    }

    /// The component whose layers have this role.
    pub const fn component(self) -> Component {
        use LayerRole::*;
        match self {
            EncoderQkv | EncoderOut | EncoderGateUp | EncoderDown | TokenTable => Component::TextEncoder,
            EncoderInputNorm | EncoderQueryNorm | EncoderKeyNorm | EncoderMlpNorm => Component::TextEncoder,
            _ => Component::Transformer,
        }
    }

    /// The first role of this role's kind. Streams, the layers of one embedder, modulations, and the last layers each form a kind.
    pub const fn kind(self) -> Self {
        use LayerRole::*;
        match self {
            Qkv(_) => Qkv(Stream::Image),
            AttentionOut(_) => AttentionOut(Stream::Image),
            MlpIn(_) => MlpIn(Stream::Image),
            MlpOut(_) => MlpOut(Stream::Image),
            TimeOut => TimeIn,
            GuidanceOut => GuidanceIn,
            TextModulation | SingleModulation => ImageModulation,
            ImageOut => FinalModulation,
            other => other,
        }
    }
}

impl LayerId {
    /// The component that the layer belongs to.
    pub const fn component(self) -> Component {
        self.role.component()
    }

    /// The canonical name of the layer's weight.
    pub fn canonical(self) -> String {
        let row = self.component().rows().iter().find(|row| row.role == Some(self.role)).expect("every role has a row");
        fill(row.canonical, &Captured { number: self.block.unwrap_or_default(), ..Captured::default() })
    }

    /// The canonical name of the layer's block; empty outside blocks.
    pub fn block_name(self) -> String {
        let name = self.canonical();
        let end = self.block.and_then(|block| Some(name.find(&format!(".{block}."))? + 1 + block.to_string().len()));
        name[..end.unwrap_or(0)].into()
    }

    pub(super) fn captured(row: &Row, captured: &Captured<'_>) -> Option<Self> {
        Some(Self { role: row.role?, block: row.canonical.contains("<n>").then_some(captured.number) })
    }
}

/// The canonical name of the layer's weight.
impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.canonical())
    }
}
