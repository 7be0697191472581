//! Renders scenes by signed distance fields: anti-aliased, lightly shaded objects with soft shadows.

use crate::world::{Background, Object, SIDE, Scene, rgb};

/// An image of the world's size.
#[derive(Clone, PartialEq)]
pub struct Image(pub Vec<[u8; 3]>);

impl Image {
    pub fn from_bytes(bytes: &[u8]) -> Self {
        assert_eq!(bytes.len(), SIDE * SIDE * 3);
        Self(bytes.chunks_exact(3).map(|p| [p[0], p[1], p[2]]).collect())
    }

    pub fn at(&self, x: usize, y: usize) -> [f32; 3] {
        self.0[y * SIDE + x].map(f32::from)
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.0.concat()
    }
}

type Point = (f32, f32);

/// A shape's outline in units of its radius; y points up.
enum Outline {
    /// The points between two radii.
    Round { inner: f32, outer: f32 },
    /// A disc without the part that a second disc covers: the x of their centers, and their radii.
    Crescent { disc: (f32, f32), bite: (f32, f32) },
    /// The union of some polygons.
    Polygons(Vec<Vec<Edge>>),
}

/// An edge of a polygon: its start, its vector, and the reciprocal of its squared length.
struct Edge {
    start: Point,
    along: Point,
    inverse: f32,
}

fn edges(points: &[Point]) -> Vec<Edge> {
    let next = points.iter().cycle().skip(1);
    let edge = |(&start, end): (&Point, &Point)| {
        let along = (end.0 - start.0, end.1 - start.1);
        Edge { start, along, inverse: 1.0 / (along.0 * along.0 + along.1 * along.1) }
    };
    points.iter().zip(next).map(edge).collect()
}

fn polar(radius: f32, degrees: f32) -> Point {
    let (sin, cos) = degrees.to_radians().sin_cos();
    (radius * cos, radius * sin)
}

fn outline(shape: &str) -> Outline {
    let polygon = |points: Vec<Point>| Outline::Polygons(vec![edges(&points)]);
    let bar = |x: f32, y: f32| vec![(x, y), (-x, y), (-x, -y), (x, -y)];
    match shape {
        "circle" => Outline::Round { inner: 0.0, outer: 0.92 },
        "ring" => Outline::Round { inner: 0.5, outer: 0.94 },
        "moon" => Outline::Crescent { disc: (0.12, 0.92), bite: (0.58, 0.74) },
        "square" => polygon(bar(0.82, 0.82)),
        "triangle" => {
            let third = 0.98 / 3f32.sqrt();
            polygon(vec![(0.0, 2.0 * third - 0.2), (-0.98, -third - 0.2), (0.98, -third - 0.2)])
        }
        "hexagon" => polygon((0..6).map(|i| polar(0.86 * 2.0 / 3f32.sqrt(), 60.0 * i as f32)).collect()),
        "star" => {
            let point = |i: usize| polar(if i.is_multiple_of(2) { 1.1 } else { 1.1 * 0.46 }, 90.0 + 36.0 * i as f32);
            polygon((0..10).map(point).map(|(x, y)| (x, y - 0.05)).collect())
        }
        "cross" => Outline::Polygons(vec![edges(&bar(0.95, 0.32)), edges(&bar(0.32, 0.95))]),
        "heart" => {
            // A tip at the origin, edges at 45 degrees, and two half circles that meet at (0, 1); then scaled.
            let arc = |i: usize| polar(2f32.sqrt() / 4.0, -45.0 + 180.0 * i as f32 / 48.0);
            let right: Vec<Point> = (0..=48).map(arc).map(|(x, y)| (x + 0.25, y + 0.75)).collect();
            let left = right.iter().rev().skip(1).map(|(x, y)| (-x, *y));
            let points = [(0.0, 0.0)].into_iter().chain(right.iter().copied()).chain(left);
            polygon(points.map(|(x, y)| (1.72 * x, 1.72 * (y - 0.56))).collect())
        }
        _ => panic!("no shape `{shape}`"),
    }
}

/// The signed distance of a point from an outline, negative inside.
fn signed_distance(outline: &Outline, (x, y): Point) -> f32 {
    match outline {
        Outline::Round { inner, outer } => {
            let r = x.hypot(y);
            if *inner > 0.0 { (inner - r).max(r - outer) } else { r - outer }
        }
        Outline::Crescent { disc, bite } => {
            let [disc, bite] = [disc, bite].map(|(center, radius)| (x - center).hypot(y) - radius);
            disc.max(-bite)
        }
        Outline::Polygons(all) => all.iter().map(|edges| polygon_distance(edges, (x, y))).fold(f32::MAX, f32::min),
    }
}

fn polygon_distance(edges: &[Edge], (x, y): Point) -> f32 {
    let (mut nearest, mut inside) = (f32::MAX, false);
    for &Edge { start, along, inverse } in edges {
        let (dx, dy) = (x - start.0, y - start.1);
        let t = ((dx * along.0 + dy * along.1) * inverse).clamp(0.0, 1.0);
        let (ox, oy) = (dx - t * along.0, dy - t * along.1);
        nearest = nearest.min(ox * ox + oy * oy);
        // The ray to the right crosses this edge.
        if (dy < 0.0) != (dy < along.1) && dx < dy / along.1 * along.0 {
            inside = !inside;
        }
    }
    if inside { -nearest.sqrt() } else { nearest.sqrt() }
}

/// The share of a background's second color at a point.
pub fn mix(kind: &str, direction: &str, x: f32, y: f32) -> f32 {
    match (kind, direction) {
        ("plain", _) => 0.0,
        ("gradient", "vertical") => y / SIDE as f32,
        ("gradient", "horizontal") => x / SIDE as f32,
        ("stripes", _) => {
            let across = match direction {
                "vertical" => x,
                "horizontal" => y,
                _ => (x + y) / 2f32.sqrt(),
            };
            // Stripes are 32 pixels wide; the first one, of the first color, is cut in half.
            let from_middle = ((across / 64.0).fract() - 0.5).abs() * 64.0;
            (0.5 - (from_middle - 16.0)).clamp(0.0, 1.0)
        }
        _ => panic!("no background `{kind}` `{direction}`"),
    }
}

pub fn lerp(a: [f32; 3], b: [f32; 3], t: f32) -> [f32; 3] {
    std::array::from_fn(|i| a[i] + t * (b[i] - a[i]))
}

/// A background's color at every pixel, 0..255.
pub fn background_of(background: &Background) -> Vec<[f32; 3]> {
    let first = rgb(&background.color);
    let second = if background.kind == "plain" { first } else { rgb(&background.color2) };
    let at = |i: usize| mix(&background.kind, &background.direction, (i % SIDE) as f32 + 0.5, (i / SIDE) as f32 + 0.5);
    (0..SIDE * SIDE).map(|i| lerp(first, second, at(i))).collect()
}

/// An object's distance field in pixels.
struct Field<'a> {
    object: &'a Object,
    outline: Outline,
}

impl<'a> Field<'a> {
    fn new(object: &'a Object) -> Self {
        Self { object, outline: outline(&object.shape) }
    }

    fn at(&self, x: f32, y: f32) -> f32 {
        let o = self.object;
        let (px, py) = ((x - o.cx) / o.r, (o.cy - y) / o.r);
        let (sin, cos) = o.rot.sin_cos();
        signed_distance(&self.outline, (cos * px + sin * py, cos * py - sin * px)) * o.r
    }

    /// Pixels that the object or its shadow can touch.
    fn reach(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (o, far) = (self.object, self.object.r * 1.2 + 12.0);
        let span = |c: f32| ((c - far).max(0.0) as usize)..((c + far).clamp(0.0, SIDE as f32) as usize);
        let (columns, rows) = (span(o.cx), span(o.cy));
        rows.flat_map(move |y| columns.clone().map(move |x| (x, y)))
    }
}

/// The pixels whose center is inside of an object.
pub fn mask_of(object: &Object) -> Vec<bool> {
    let (field, mut mask) = (Field::new(object), vec![false; SIDE * SIDE]);
    for (x, y) in field.reach() {
        mask[y * SIDE + x] = field.at(x as f32 + 0.5, y as f32 + 0.5) < 0.0;
    }
    mask
}

pub fn render(scene: &Scene) -> Image {
    let mut image: Vec<[f32; 3]> = background_of(&scene.background).iter().map(|p| p.map(|v| v / 255.0)).collect();
    for o in &scene.objects {
        let field = Field::new(o);
        let paint = rgb(&o.color).map(|v| (v / 255.0 * (1.0 + o.tint)).clamp(0.0, 1.0));
        for (column, row) in field.reach() {
            let (x, y) = (column as f32 + 0.5, row as f32 + 0.5);
            let pixel = &mut image[row * SIDE + column];
            let d = field.at(x, y);
            // Well inside of the object its shadow is hidden, and well outside there is none.
            let under = if (-0.5..9.0).contains(&d) { field.at(x - 2.0, y - 3.5) } else { f32::MAX };
            let shade = 1.0 - 0.2 * ((4.5 - under) / 9.0).clamp(0.0, 1.0).powi(2);
            let (px, py) = ((x - o.cx) / o.r, (o.cy - y) / o.r);
            let light = 1.0 + 0.07 * (0.8 * py - 0.5 * px).clamp(-1.0, 1.0) - 0.06 * (1.0 + d / 3.0).clamp(0.0, 1.0);
            let lit = paint.map(|v| (v * light + 0.02 * py).clamp(0.0, 1.0));
            *pixel = lerp(pixel.map(|v| v * shade), lit, (0.5 - d).clamp(0.0, 1.0));
        }
    }
    Image(image.iter().map(|p| p.map(|v| (v * 255.0).round() as u8)).collect())
}
