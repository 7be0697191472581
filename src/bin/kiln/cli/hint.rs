//! Rewords the library's errors and remedies for the command line, which names flags.

use kiln::Component;
use kiln::error::{EXPECTED, Error, Remedy, alternatives};
use kiln::text::{amount, shown_text};

/// The hint for a failed allocation. It is a constant because the program's allocator prints it, too, when no memory is left to
/// format a text.
pub const SAVE_MEMORY: &str = "lower --width and --height, close other programs, or allow this one more memory";

/// The hint for a bug.
pub const REPORT_BUG: &str = "this is a bug in kiln; please report it with the command line";

/// The message of an error for a user of the command line.
pub fn message(error: &Error) -> String {
    match error {
        Error::ImageSize { width, height, rule, .. } => format!("--width {width} --height {height}: {rule}"),
        Error::IncompleteModel { what, .. } => format!("no model found (--model): {}", shown_text(what)),
        other => other.to_string(),
    }
}

/// The remedy of an error for a user of the command line.
pub fn hint(error: &Error) -> Option<String> {
    error.remedy().map(|remedy| shown_text(&describe(&remedy)))
}

/// The message of an error for the author of a line of JSON, which has fields and no flags.
pub fn message_of_line(error: &Error) -> String {
    match error {
        Error::ImageSize { width, height, rule, .. } => format!("`width` {width}, `height` {height}: {rule}"),
        other => message(other),
    }
}

/// The remedy of an error for the author of a line of JSON. What only flags decide keeps its flag.
pub fn hint_of_line(error: &Error) -> Option<String> {
    error.remedy().map(|remedy| shown_text(&describe_for_line(&remedy)))
}

fn describe_for_line(remedy: &Remedy) -> String {
    match remedy {
        Remedy::AnyOf(ways) => format!("try to {}", alternatives(&ways.iter().map(describe_for_line).collect::<Vec<_>>())),
        Remedy::SmallerImage => "lower `width` and `height`".into(),
        Remedy::LegalSize { width, height } => format!("try `width` {width} and `height` {height}"),
        Remedy::SizeThatFits { width, height, bytes } => {
            format!("use `width` {width} and `height` {height} ({})", amount(*bytes))
        }
        Remedy::FewerReferences => "give fewer `references`".into(),
        Remedy::SaveMemory => {
            let ways = [Remedy::SmallerImage, Remedy::ClosePrograms, Remedy::AllowMemory];
            alternatives(&ways.each_ref().map(describe_for_line))
        }
        Remedy::Overwrite => "give the line another `output`, or start kiln run with --force".into(),
        Remedy::VaeTiling { bytes } => format!("start kiln run with --vae-tiling ({})", amount(*bytes)),
        Remedy::CpuBackend => "start kiln run with --backend cpu".into(),
        other => describe(other),
    }
}

/// Describes a remedy with flags.
pub fn describe(remedy: &Remedy) -> String {
    let flags = |parts: &[Component]| parts.iter().map(|part| flag(*part)).collect::<Vec<_>>();
    match remedy {
        Remedy::AnyOf(ways) => format!("try to {}", alternatives(&ways.iter().map(describe).collect::<Vec<_>>())),
        Remedy::SmallerImage => "lower --width and --height".into(),
        Remedy::LegalSize { width, height } => format!("try --width {width} --height {height}"),
        Remedy::SizeThatFits { width, height, bytes } => format!("use --width {width} --height {height} ({})", amount(*bytes)),
        Remedy::SizeOfNoise => "use the --width and --height it was made for".into(),
        Remedy::VaeTiling { bytes } => format!("use --vae-tiling ({})", amount(*bytes)),
        Remedy::FewerReferences => "give fewer --reference".into(),
        Remedy::SaveMemory => SAVE_MEMORY.into(),
        Remedy::CpuBackend => "use --backend cpu".into(),
        Remedy::CpuBackendIfAgain => "if it happens again, --backend cpu runs without the GPU".into(),
        Remedy::RepairGpu(way) => format!("{}; --backend cpu runs without one", describe(way)),
        Remedy::ListGpus => "kiln doctor lists the GPUs of this machine".into(),
        Remedy::ReportBug => REPORT_BUG.into(),
        Remedy::Overwrite => "use --force or another name".into(),
        Remedy::Restart => "repeat that command to continue it, use --restart to begin anew, or another name".into(),
        Remedy::BeginAnew => "use --restart to begin anew, or another name".into(),
        Remedy::NameModel => "name a model folder with --model".into(),
        Remedy::NameModelOrCache => "name a model with --model, or another cache with HF_HUB_CACHE".into(),
        Remedy::FinishDownload { repository, own: Some(own) } => {
            let download = Remedy::FinishDownload { repository: repository.clone(), own: None };
            format!("{download}; --model {own} is kiln's own small model")
        }
        Remedy::NameParts => "give a single file as --transformer, with --text-encoder and --vae".into(),
        Remedy::CompleteFolder => format!("{EXPECTED}, or give --transformer, --text-encoder and --vae"),
        Remedy::PickParts(parts) => format!("pick one with {}", flags(parts).join(" and one with ")),
        Remedy::ReplaceParts(parts) => {
            format!("put a complete file there, or give another with {}", flags(parts).join(" and "))
        }
        Remedy::AnyVariant => "leave out --variant, and `variant` in kiln.json; the weights show it".into(),
        Remedy::Nvfp4Layout => "if the file stores NVFP4 in another order, name it with --nvfp4-layout".into(),
        Remedy::AnyAttention => "leave out --attention to use FP8 where it is available".into(),
        Remedy::AnyNvfp4Math => "leave out --nvfp4-math to multiply them as the device can".into(),
        Remedy::ApplyAdapter => "name the model that it was made for, and pass this file with --lora".into(),
        Remedy::InspectAdapter => {
            "kiln takes LoRA and LoKr of FLUX.2 models; `kiln lora inspect FILE` lists what a file has".into()
        }
        Remedy::PartOfAdapter => "use an adapter made for this model, or --lora-partial to apply the layers that fit".into(),
        Remedy::MergeAdapters => "use --lora-mode merge".into(),
        Remedy::UnmergedAdapters => "leave out --lora-mode merge, or name the same adapters as --lora".into(),
        Remedy::AsStored => "leave out --quantize, or name files that hold them in bf16, f16 or f32".into(),
        plain => plain.to_string(),
    }
}

/// The flag that names the weights of a part.
fn flag(part: Component) -> &'static str {
    match part {
        Component::Transformer => "--transformer",
        Component::TextEncoder => "--text-encoder",
        Component::Vae => "--vae",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln::Pixels;

    #[test]
    fn the_allocator_prints_the_hint_of_the_remedy() {
        let ways = [Remedy::SmallerImage, Remedy::ClosePrograms, Remedy::AllowMemory];
        assert_eq!(alternatives(&ways.each_ref().map(describe)), SAVE_MEMORY);
    }

    /// A line has fields where the command line has flags.
    #[test]
    fn lines_are_told_of_fields() {
        let size = Pixels::new(1000, 1001).unwrap_err();
        assert!(message_of_line(&size).starts_with("`width` 1000, `height` 1001: sides must be multiples of 16"));
        assert_eq!(hint_of_line(&size).as_deref(), Some("try `width` 992 and `height` 1008"));
        let fits = Remedy::SizeThatFits { width: 64, height: 128, bytes: 1 << 30 };
        for remedy in [Remedy::AnyOf(vec![fits, Remedy::SmallerImage, Remedy::FewerReferences]), Remedy::SaveMemory] {
            let text = describe_for_line(&remedy);
            assert!(!text.contains("--") && text.contains("`width`") && text.contains("`height`"), "{text}");
        }
        assert_eq!(describe_for_line(&Remedy::PartOfAdapter), describe(&Remedy::PartOfAdapter));
    }

    /// The library's texts name no flags, because its callers have none. The command line's texts do.
    #[test]
    fn only_the_command_line_names_flags() {
        let parts = || vec![Component::Transformer, Component::Vae];
        for remedy in [
            Remedy::AnyOf(vec![Remedy::FewerReferences, Remedy::CpuBackend]),
            Remedy::SmallerImage,
            Remedy::LegalSize { width: 64, height: 128 },
            Remedy::SizeThatFits { width: 64, height: 128, bytes: 1 },
            Remedy::SizeOfNoise,
            Remedy::VaeTiling { bytes: 1 },
            Remedy::FewerReferences,
            Remedy::SaveMemory,
            Remedy::CpuBackend,
            Remedy::CpuBackendIfAgain,
            Remedy::RepairGpu(Box::new("update the driver".into())),
            Remedy::Overwrite,
            Remedy::NameModel,
            Remedy::NameModelOrCache,
            Remedy::FinishDownload { repository: "a/b".into(), own: Some("tiny") },
            Remedy::NameParts,
            Remedy::CompleteFolder,
            Remedy::PickParts(parts()),
            Remedy::ReplaceParts(parts()),
            Remedy::AnyVariant,
            Remedy::BeginAnew,
            Remedy::Nvfp4Layout,
            Remedy::AnyAttention,
            Remedy::AnyNvfp4Math,
            Remedy::AsStored,
            Remedy::ApplyAdapter,
            Remedy::PartOfAdapter,
            Remedy::MergeAdapters,
            Remedy::UnmergedAdapters,
        ] {
            assert!(describe(&remedy).contains("--"), "{remedy:?}");
            assert!(!remedy.to_string().contains("--") && !remedy.to_string().is_empty(), "{remedy:?}");
        }
        for (remedy, command) in [(Remedy::ListGpus, "kiln doctor"), (Remedy::InspectAdapter, "kiln lora inspect")] {
            assert!(describe(&remedy).contains(command) && !remedy.to_string().contains(command), "{remedy:?}");
        }
        let size = Pixels::new(1000, 1001).unwrap_err();
        let rule = "sides must be multiples of 16, at least 64, and within the token limit";
        assert_eq!(size.to_string(), format!("1000x1001: {rule}"));
        assert_eq!(message(&size), format!("--width 1000 --height 1001: {rule}"));
        assert_eq!(hint(&size).as_deref(), Some("try --width 992 --height 1008"));
        assert_eq!(size.hint().as_deref(), Some("try 992x1008"));
    }
}
