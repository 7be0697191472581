//! JPEGs of every layout: subsampling, order and split of scans, progression, restart markers, color markers. The encoder in
//! `tools/goldens/jpeg_layouts.py` writes them, because common programs write only a few; each is valid, and must decode as in Pillow.

use super::{decode, fixtures, refusal};
use common::random::{long, one_in};
use kiln::image::Image;
use kiln::internals::checkpoint::Shard;

/// A layout: its name, the JPEG, and the image that it must decode to.
pub struct Layout {
    name: String,
    pub jpeg: Vec<u8>,
    image: Image,
}

fn layouts() -> Vec<Layout> {
    let shard = Shard::open(&fixtures().join("layouts.safetensors")).unwrap();
    let names = shard.tensors().filter_map(|(name, _)| name.strip_prefix("jpeg."));
    names
        .map(|name| {
            let image = name.split('.').next().unwrap();
            let [jpeg, png] = [format!("jpeg.{name}"), format!("png.{image}")].map(|name| shard.bytes(&name).unwrap());
            Layout { name: name.into(), jpeg: jpeg.to_vec(), image: decode(&png).unwrap().image().clone() }
        })
        .collect()
}

pub fn layout(name: &str) -> Layout {
    layouts().into_iter().find(|layout| layout.name == name).unwrap_or_else(|| panic!("no layout {name}"))
}

/// The offset of the first segment with this marker.
fn find(jpeg: &[u8], marker: u8) -> usize {
    jpeg.windows(2).position(|w| w == [0xFF, marker]).unwrap()
}

/// The offset of each scan.
fn scans(jpeg: &[u8]) -> Vec<usize> {
    (0..jpeg.len() - 1).filter(|&at| jpeg[at..].starts_with(&[0xFF, 0xDA])).collect()
}

#[test]
fn every_layout_is_pillows_image_in_every_bit() {
    let layouts = layouts();
    assert!(layouts.len() >= 130, "{}", layouts.len());
    for Layout { name, jpeg, image } in layouts {
        let got = decode(&jpeg).unwrap_or_else(|error| panic!("{name}: {error}"));
        let different = got.image().pixels.iter().zip(&image.pixels).filter(|(a, b)| a != b).count();
        assert_eq!((got.image().width, got.image().height, different), (image.width, image.height, 0), "{name}");
    }
}

#[test]
fn a_layout_cut_anywhere_is_refused_even_with_an_end_mark() {
    let (mut cuts, mut missing) = (0, 0);
    for Layout { name, jpeg, .. } in layouts() {
        let end = jpeg.len() - 2;
        // Cuts around the start of each scan, at every 13th byte, and in the last bytes.
        let near = scans(&jpeg).into_iter().flat_map(|at| at - 1..at + 16);
        let places = near.chain((2..end).step_by(13)).chain(end - 8..end).filter(|&at| at < end);
        let mut places: Vec<usize> = one_in(5, &name, places).collect();
        places.sort_unstable();
        places.dedup();
        for &length in &places {
            let message = match decode(&[&jpeg[..length], &[0xFF, 0xD9]].concat()) {
                Ok(_) => panic!("{name} cut to {length} of {} bytes is accepted", jpeg.len()),
                Err(error) => error.to_string(),
            };
            missing += usize::from(message.contains("scans are missing"));
        }
        cuts += places.len();
        // The control: the whole file with its end marker written anew is valid.
        decode(&[&jpeg[..end], &[0xFF, 0xD9]].concat()).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let least = if long() { (15_000, 1000) } else { (2000, 100) };
    assert!(cuts > least.0 && missing > least.1, "{cuts} cuts, {missing} of them whole scans");
}

#[test]
fn scans_that_are_missing_or_come_twice_are_named() {
    // Parts of a file: what comes before the scans, and each scan with its tables.
    let parts = |jpeg: &[u8]| -> Vec<Vec<u8>> {
        let (mut bounds, mut from) = (vec![0], 0);
        for at in scans(jpeg) {
            let tables = jpeg[from..at].windows(2).position(|w| w == [0xFF, 0xC4]);
            bounds.push(tables.map_or(at, |tables| from + tables));
            from = at + 2;
        }
        bounds.push(jpeg.len() - 2);
        bounds.windows(2).map(|w| jpeg[w[0]..w[1]].to_vec()).collect()
    };
    let chosen = |parts: &[Vec<u8>], which: &[usize]| {
        let file: Vec<u8> = which.iter().flat_map(|&i| parts[i].clone()).collect();
        [&file[..], &[0xFF, 0xD9]].concat()
    };
    let apart = parts(&layout("420.apart").jpeg);
    assert_eq!(apart.len(), 4);
    decode(&chosen(&apart, &[0, 1, 2, 3])).unwrap();
    // Scans may be in any order.
    let other_order = decode(&chosen(&apart, &[0, 3, 1, 2])).unwrap();
    assert_eq!(other_order.image(), decode(&layout("420.apart").jpeg).unwrap().image());
    // This layout has a scan each of Cr, Cb and Y.
    for (which, message) in [
        (&[0, 1, 2][..], "scans are missing: all of component 1 of 3"),
        (&[0, 1, 3], "scans are missing: all of component 2 of 3"),
        (&[0, 2, 3], "scans are missing: all of component 3 of 3"),
        (&[0, 1, 2, 2, 3], "a scan repeats coefficients of an earlier one"),
    ] {
        assert_eq!(refusal(&chosen(&apart, which)), format!("damaged image (x): {message}"));
    }
    let progressive = parts(&layout("420.successive").jpeg);
    let all: Vec<usize> = (0..progressive.len()).collect();
    decode(&chosen(&progressive, &all)).unwrap();
    for left_out in 1..progressive.len() {
        let which: Vec<usize> = all.iter().copied().filter(|&i| i != left_out).collect();
        let message = refusal(&chosen(&progressive, &which));
        assert!(message.contains("scans are missing"), "without scan {left_out}: {message}");
        let which: Vec<usize> = all.iter().flat_map(|&i| if i == left_out { vec![i, i] } else { vec![i] }).collect();
        let message = refusal(&chosen(&progressive, &which));
        assert!(message.contains("repeats") || message.contains("missing"), "with scan {left_out} twice: {message}");
    }
}

#[test]
fn restart_marks_must_be_where_they_belong() {
    let Layout { jpeg, image, .. } = layout("420.restarts");
    let data = *scans(&jpeg).last().unwrap();
    let marks: Vec<usize> =
        (data..jpeg.len() - 1).filter(|&at| jpeg[at] == 0xFF && (0xD0..=0xD7).contains(&jpeg[at + 1])).collect();
    assert!(marks.len() > 8, "{}", marks.len());
    let expected = "damaged image (x): its image data lacks a restart marker";
    for &at in &marks {
        let mut other = jpeg.clone();
        other[at + 1] = 0xD0 | ((other[at + 1] + 1) & 7);
        assert_eq!(refusal(&other), expected);
        // No marker, one too many, or bytes before it.
        assert!(decode(&[&jpeg[..at], &jpeg[at + 2..]].concat()).is_err());
        assert!(decode(&[&jpeg[..at], &jpeg[at..at + 2], &jpeg[at..]].concat()).is_err());
        assert_eq!(refusal(&[&jpeg[..at], &[0x55, 0x55], &jpeg[at..]].concat()), expected);
        // A marker may be preceded by any number of FF.
        assert!(decode(&[&jpeg[..at], &[0xFF, 0xFF], &jpeg[at..]].concat()).unwrap().image() == &image);
    }
    // Without one interval the rest of the image would be shifted.
    assert!(decode(&[&jpeg[..marks[2]], &jpeg[marks[3]..]].concat()).is_err());
}

#[test]
fn what_follows_the_last_block_of_a_scan_is_ignored() {
    // Some encoders pad, and some end with a restart marker. Pillow accepts both.
    for name in ["420.together", "420.apart", "420.successive", "420.restarts", "grey.apart"] {
        let Layout { jpeg, image, .. } = layout(name);
        let last = scans(&jpeg)[0];
        let end = last + 4 + (jpeg[last + 4..].windows(2)).position(|w| w[0] == 0xFF && matches!(w[1], 0xC4 | 0xD9)).unwrap();
        for surplus in [&[0][..], &[0; 100], &[0x12, 0x34], &[0xFF, 0xD0], &[0xFF, 0]] {
            let longer = [&jpeg[..end], surplus, &jpeg[end..]].concat();
            assert!(decode(&longer).unwrap_or_else(|error| panic!("{name}: {error}")).image() == &image, "{name}");
        }
    }
}

#[test]
fn tables_and_headers_that_make_no_sense_are_named() {
    let jpeg = layout("420.together").jpeg;
    let progressive = layout("420.successive").jpeg;
    let changed = |jpeg: &[u8], at: usize, to: u8| {
        let mut out = jpeg.to_vec();
        assert_ne!(out[at], to);
        out[at] = to;
        refusal(&out)
    };
    let (frame, scan, codes) = (find(&jpeg, 0xC0), find(&jpeg, 0xDA), find(&jpeg, 0xC4));
    let first = find(&progressive, 0xDA);
    let refine = *scans(&progressive).last().unwrap();
    let damaged = |message: &str| format!("damaged image (x): {message}");
    for (got, want) in [
        (changed(&jpeg, frame + 14, 0x31), "cannot read image (x): content is a JPEG with the rare sampling 2:3 across".into()),
        (changed(&jpeg, frame + 11, 0x44), damaged("a scan has 18 blocks in an MCU, limit 10")),
        (changed(&jpeg, frame + 12, 3), damaged("its quantization table 3 is missing")),
        (changed(&jpeg, scan + 6, 0x33), damaged("its Huffman table 3 is missing")),
        (changed(&jpeg, scan + 6, 0x4F), damaged("its Huffman table 4 is missing")),
        (changed(&jpeg, scan + 5, 7), damaged("a scan names a component out of order")),
        (changed(&jpeg, scan + 7, 1), damaged("a scan names a component out of order")),
        (changed(&jpeg, scan + 4, 5), damaged("the header of a scan is broken")),
        (changed(&jpeg, scan + 12, 5), damaged("a scan has an impossible range of coefficients or bits")),
        (changed(&jpeg, scan + 13, 1), damaged("a scan has an impossible range of coefficients or bits")),
        (changed(&progressive, first + 12, 5), damaged("a scan has an impossible range of coefficients or bits")),
        (changed(&progressive, first + 13, 0x0E), damaged("a scan has an impossible range of coefficients or bits")),
        (changed(&progressive, refine + 9, 0x31), damaged("a scan has an impossible range of coefficients or bits")),
        (changed(&progressive, refine + 9, 0x21), damaged("scans are missing: one refines bits that no earlier one has")),
        (changed(&jpeg, codes + 5, 200), damaged("a Huffman table is broken")),
        (changed(&jpeg, codes + 4, 0x24), damaged("a Huffman table is broken")),
    ] {
        assert_eq!(got, want);
    }
}
