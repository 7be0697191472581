//! The model of `models/builtin`, embedded in the program. The library, tests and benchmarks do not embed it; they read the folder.

use kiln::locate::Embedded;

/// Aligns an embedded file, so that its weights can be read in place: the header of a safetensors file is padded so that the data
/// is aligned if the file is.
#[repr(align(64))]
struct Aligned<T: ?Sized>(T);

macro_rules! file {
    ($path:literal) => {
        ($path, {
            static FILE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!("../../../models/builtin/", $path)));
            &FILE.0
        })
    };
}

static FILES: [(&str, &[u8]); 9] = [
    file!("kiln.json"),
    file!("model_index.json"),
    file!("text_encoder/config.json"),
    file!("text_encoder/model.safetensors"),
    file!("tokenizer/tokenizer.json"),
    file!("transformer/config.json"),
    file!("transformer/diffusion_pytorch_model.safetensors"),
    file!("vae/config.json"),
    file!("vae/diffusion_pytorch_model.safetensors"),
];

/// The embedded model.
pub const MODEL: Embedded = Embedded { files: &FILES };

#[cfg(test)]
mod tests {
    use super::*;
    use kiln::Component;

    #[test]
    fn weights_are_read_in_place() {
        for (part, name) in [
            (Component::Transformer, "transformer/diffusion_pytorch_model.safetensors"),
            (Component::TextEncoder, "text_encoder/model.safetensors"),
            (Component::Vae, "vae/diffusion_pytorch_model.safetensors"),
        ] {
            let weights = MODEL.weights(part, name).unwrap();
            let shard = &weights.shards()[0];
            for (tensor, entry) in shard.tensors() {
                let (bytes, size) = (shard.bytes(tensor).unwrap(), entry.dtype.bits as usize / 8);
                assert_eq!(bytes.as_ptr().align_offset(size), 0, "{name}: {tensor}");
                // The bytes lie inside the program, not in a copy.
                let file = FILES.iter().find(|(path, _)| *path == name).unwrap().1;
                assert!(file.as_ptr_range().contains(&bytes.as_ptr()), "{name}: {tensor}");
            }
        }
    }
}
