//! LoRA and LoKr files.

use crate::check_file_error;
use crate::weights::{file, open};
use common::cost::peak_of;
use kiln::internals::adapter::{Adapter, Contents, LayerTargets};
use kiln::internals::config::Configs;
use std::sync::LazyLock;

static TINY: LazyLock<LayerTargets> = LazyLock::new(|| Configs::TINY.layer_targets());

/// An adapter for the tiny model, in a file that is made as [`safetensors`](crate::safetensors) makes its files. The layers of an accepted
/// adapter have the model's shapes, and add finite values. `kiln lora` lists the same layers.
pub fn adapter(data: &[u8]) {
    let file = file(data);
    let length = file.len() as isize;
    let Ok(shard) = open(file) else { return };
    let (contents, peak) = peak_of(|| Contents::read(&shard));
    assert!(peak <= (1 << 16) + 64 * length, "{peak} bytes for a file of {length}");
    if let Err(error) = &contents {
        check_file_error(error);
    }
    let adapter = match Adapter::read(&shard, &TINY) {
        Ok(adapter) => adapter,
        Err(error) => return check_file_error(&error),
    };
    let contents = contents.expect("an adapter that is accepted has contents");
    assert!(!adapter.layers.is_empty());
    assert_eq!(contents.digest, adapter.digest);
    for layer in &adapter.layers {
        let listed = contents.layers.iter().find(|listed| listed.name == layer.name).expect("the layer is listed");
        assert!(listed.supported && listed.fault.is_none(), "{}: {:?}", layer.name, listed.fault);
        assert_eq!(listed.shape, Some(layer.delta.shape()), "{}", layer.name);
        let [rows, cols] = layer.delta.shape();
        assert_eq!([rows, cols], [layer.target.len(), layer.target.cols], "{}", layer.name);
        assert!(layer.delta.scale.is_finite(), "{}", layer.name);
        let mut added = vec![0.0; rows * cols];
        layer.delta.add_to(1.0, &mut added);
        assert!(added.iter().all(|value| value.is_finite()), "{}", layer.name);
    }
}
