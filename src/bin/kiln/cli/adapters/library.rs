//! The adapters that lines and requests name. A file is opened once, and again if it changes.

use super::super::args::LoraArg;
use super::{AS_BRANCHES, describe, open_adapter};
use kiln::error::Result;
use kiln::locate::{Environment, locate_adapter};
use kiln::lora::{Adapter, Adapters, LayerTargets};
use kiln::quantize::Identity;
use std::sync::Arc;

/// The most files that are kept open.
const KEPT: usize = 32;

/// Open adapters of one model.
pub struct Library {
    targets: LayerTargets,
    environment: Environment,
    /// Whether layers that the model does not have are left out.
    partial: bool,
    /// The open files, most recently used last.
    open: Vec<(Identity, Adapter)>,
}

impl Library {
    pub fn new(targets: LayerTargets, environment: Environment, partial: bool) -> Self {
        Self { targets, environment, partial, open: Vec::new() }
    }

    /// The adapters of a line or a request. Describes newly opened files to `tell`, one line of text each.
    pub fn open(&mut self, list: &[LoraArg], tell: &mut dyn FnMut(&str)) -> Result<Arc<Adapters>> {
        let open = |lora: &LoraArg| Ok((self.adapter(lora, tell)?, lora.scale));
        list.iter().map(open).collect::<Result<_>>().map(|list| Arc::new(Adapters(list)))
    }

    fn adapter(&mut self, lora: &LoraArg, tell: &mut dyn FnMut(&str)) -> Result<Adapter> {
        let path = locate_adapter(&lora.file, &self.environment)?;
        let identity = Identity::of_file(&path)?;
        let kept = self.open.iter().position(|(kept, _)| *kept == identity);
        let entry = match kept {
            Some(at) => self.open.remove(at),
            None => {
                let adapter = open_adapter(&path, self.partial, &self.targets)?;
                tell(&describe(&adapter, lora.scale, AS_BRANCHES).0);
                // An earlier version of the file is of no use.
                self.open.retain(|(kept, _)| kept.path != identity.path);
                (identity, adapter)
            }
        };
        if self.open.len() == KEPT {
            self.open.remove(0);
        }
        let adapter = entry.1.clone();
        self.open.push(entry);
        Ok(adapter)
    }
}
