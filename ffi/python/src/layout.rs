//! Layouts: declared in Python with dataclasses (`kvxfer/_declare.py`), validated in Rust.

use kvxfer::PoolLayout;
use kvxfer::layout::{
    Arrangement, Axis, DType, Geometry, HeadOrder, InnerOrder, Model, PlaneArrangement, PlaneKind, PlaneSpec, Sharding,
};
use pyo3::exceptions::{PyIndexError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arguments::{U16, U32, U64, type_name};
use crate::error::{invalid, raise};

const DTYPES: [DType; 7] = [
    DType::U8,
    DType::I8,
    DType::F8E4M3,
    DType::F8E5M2,
    DType::F16,
    DType::Bf16,
    DType::F32,
];

/// What a pool's memory means, validated: groups, planes, regions. Immutable.
#[pyclass(frozen, module = "kvxfer", name = "Layout")]
pub(crate) struct Layout {
    pub(crate) inner: PoolLayout,
}

#[pymethods]
impl Layout {
    /// Declares and validates a layout. Planes without `base` follow one another in their region; `regions` gives the
    /// bytes of regions that are longer than their planes need.
    #[new]
    #[pyo3(signature = (groups, planes, regions = None, shared_blocks = false))]
    fn new(
        groups: &Bound<'_, PyAny>,
        planes: &Bound<'_, PyAny>,
        regions: Option<&Bound<'_, PyDict>>,
        shared_blocks: bool,
    ) -> PyResult<Layout> {
        let mut builder = PoolLayout::builder();
        for (index, group) in groups.try_iter()?.enumerate() {
            let group = group?;
            let name: String = field(&group, "Group", "name")?;
            let geometry = geometry(&field::<Bound<'_, PyAny>>(&group, "Group", "geometry")?)?;
            let blocks: U32 = field(&group, "Group", "blocks")?;
            builder.group(name, geometry, blocks.0);
            if let Some(window) = field::<Option<U32>>(&group, "Group", "window")? {
                builder.window(u16::try_from(index).unwrap_or(u16::MAX), window.0);
            }
        }
        for plane in planes.try_iter()? {
            builder.plane(plane_spec(&plane?)?);
        }
        for (region, length) in regions.into_iter().flat_map(|regions| regions.iter()) {
            builder.region(region.extract::<U32>()?.0, length.extract::<U64>()?.0);
        }
        if shared_blocks {
            builder.shared_blocks();
        }
        let inner = builder.build().map_err(raise)?;
        Ok(Layout { inner })
    }

    /// A layout of `blocks` blocks of `block_bytes` raw bytes each, in one region.
    #[staticmethod]
    fn opaque(block_bytes: U32, blocks: U32) -> PyResult<Layout> {
        let inner = PoolLayout::opaque(block_bytes.0, blocks.0).map_err(raise)?;
        Ok(Layout { inner })
    }

    /// The layout of one tensor-parallel rank of a model that kvxfer knows by name ("llama-3.1-70b"), arranged
    /// "per_layer", "fused", "block_major" or "per_head", each with "_nhd" or "_hnd". `layers` chooses some of them
    /// by number.
    #[staticmethod]
    #[pyo3(signature = (model, rank = U16(0), size = U16(1), tokens_per_block = U32(16), blocks = U32(64), arrangement = "per_layer_nhd", layers = None),
           text_signature = "(model, rank=0, size=1, tokens_per_block=16, blocks=64, arrangement='per_layer_nhd', layers=None)")]
    fn preset(
        model: &str,
        rank: U16,
        size: U16,
        tokens_per_block: U32,
        blocks: U32,
        arrangement: &str,
        layers: Option<Vec<U16>>,
    ) -> PyResult<Layout> {
        let wanted = |layer: u16| layers.as_ref().is_none_or(|layers| layers.contains(&U16(layer)));
        let arrangement = parse_arrangement(arrangement)?;
        let inner = Model::preset(model)
            .and_then(|model| model.layout_of_layers(rank.0, size.0, tokens_per_block.0, blocks.0, arrangement, wanted))
            .map_err(raise)?;
        Ok(Layout { inner })
    }

    /// The layer ids, in plane order: what a layer range counts in.
    #[getter]
    fn layers(&self) -> Vec<String> {
        self.inner.layers().to_vec()
    }

    /// Bytes that each region must have.
    #[getter]
    fn region_lengths(&self) -> Vec<u64> {
        self.inner.region_lengths().to_vec()
    }

    /// A hash of everything declared in the geometry (not of addresses), equal on equal declarations.
    #[getter]
    fn geometry_hash(&self) -> u64 {
        self.inner.geometry_hash()
    }

    /// Whether planes of different groups may overlap, a block id belonging to one group at a time.
    #[getter]
    fn shared_blocks(&self) -> bool {
        self.inner.shared_blocks()
    }

    /// The number of planes.
    #[getter]
    fn planes(&self) -> usize {
        self.inner.planes().len()
    }

    /// Per cache group: name, tokens per block, blocks.
    #[getter]
    fn groups(&self) -> Vec<(String, u32, u32)> {
        let groups = self.inner.cache_groups().iter();
        groups
            .map(|group| (group.name.clone(), group.geometry.tokens_per_block, group.blocks))
            .collect()
    }

    /// Bytes of one block of a cache group, over all its planes.
    #[pyo3(signature = (group = U16(0)), text_signature = "($self, group=0)")]
    fn block_bytes(&self, group: U16) -> PyResult<u64> {
        if usize::from(group.0) >= self.inner.groups() {
            return Err(PyIndexError::new_err(format!(
                "cache group {} of a layout of {}",
                group.0,
                self.inner.groups()
            )));
        }
        let planes = self.inner.planes().iter().filter(|plane| plane.group == group.0);
        Ok(planes.map(|plane| plane.block_length).sum())
    }

    /// Where a block of a plane begins: region and offset in bytes.
    fn plane_offset(&self, plane: U32, block: U32) -> PyResult<(u32, u64)> {
        self.inner.plane_offset(plane.0 as usize, block.0).map_err(raise)
    }

    /// A description of a plane: layer, group, kind, region, base, stride, block length, blocks, heads, order.
    fn plane<'py>(&self, py: Python<'py>, plane: U32) -> PyResult<Bound<'py, PyDict>> {
        let planes = self.inner.planes();
        let Some(found) = planes.get(plane.0 as usize) else {
            return Err(PyIndexError::new_err(format!(
                "plane {} of a layout of {}",
                plane.0,
                planes.len()
            )));
        };
        let described = PyDict::new(py);
        described.set_item("layer", &self.inner.layers()[usize::from(found.layer)])?;
        described.set_item("group", found.group)?;
        described.set_item("kind", kind_name(found.kind))?;
        described.set_item("region", found.region)?;
        described.set_item("base", found.base)?;
        described.set_item("stride", found.stride)?;
        described.set_item("block_length", found.block_length)?;
        described.set_item("blocks", found.blocks)?;
        described.set_item("heads", found.heads.map(|heads| (heads.start, heads.end)))?;
        described.set_item("order", found.order.to_string())?;
        Ok(described)
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other
            .cast::<Layout>()
            .is_ok_and(|other| other.get().inner == self.inner)
    }

    fn __hash__(&self) -> u64 {
        self.inner.geometry_hash()
    }

    fn __repr__(&self) -> String {
        let groups: Vec<String> = self
            .inner
            .cache_groups()
            .iter()
            .map(|group| format!("{}: {} blocks", group.name, group.blocks))
            .collect();
        let bytes: u64 = self.inner.region_lengths().iter().sum();
        format!(
            "<kvxfer.Layout {}; {} layers, {} planes, {} regions, {bytes} bytes>",
            groups.join(", "),
            self.inner.layers().len(),
            self.inner.planes().len(),
            self.inner.region_lengths().len()
        )
    }
}

/// The heads of a model with `kv_heads` that a rank holds, as `(start, end)`.
#[pyfunction]
pub(crate) fn _local_heads(sharding: &Bound<'_, PyAny>, kv_heads: U32) -> PyResult<(u32, u32)> {
    let heads = parse_sharding(sharding)?.local_heads(kv_heads.0).map_err(raise)?;
    Ok((heads.start, heads.end))
}

/// Bytes of one element.
#[pyfunction]
pub(crate) fn _dtype_bytes(dtype: &str) -> PyResult<u64> {
    parse_dtype(dtype).map(DType::bytes)
}

/// An attribute of one of the declarations, with a message that says which.
fn field<'py, T>(object: &Bound<'py, PyAny>, class: &str, name: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
    for<'a> <T as FromPyObject<'a, 'py>>::Error: Into<PyErr>,
{
    let value = object
        .getattr(name)
        .map_err(|_| PyTypeError::new_err(format!("a kvxfer.{class}, not {}", type_name(object))))?;
    value.extract::<T>().map_err(|error| {
        let error: PyErr = error.into();
        match error.is_instance_of::<PyTypeError>(object.py()) {
            true => PyTypeError::new_err(format!("{class}.{name}: {}", error.value(object.py()))),
            false => error,
        }
    })
}

fn geometry(object: &Bound<'_, PyAny>) -> PyResult<Geometry> {
    const CLASS: &str = "Geometry";
    let dtype: String = field(object, CLASS, "dtype")?;
    let number = |name: &str| field::<U32>(object, CLASS, name).map(|number| number.0);
    Ok(Geometry {
        dtype: parse_dtype(&dtype)?,
        tokens_per_block: number("tokens_per_block")?,
        kv_heads: number("kv_heads")?,
        head_size: number("head_size")?,
        value_head_size: number("value_head_size")?,
        sharding: parse_sharding(&field::<Bound<'_, PyAny>>(object, CLASS, "sharding")?)?,
    })
}

fn parse_sharding(object: &Bound<'_, PyAny>) -> PyResult<Sharding> {
    const CLASS: &str = "Sharding";
    let by: String = field(object, CLASS, "by")?;
    let rank = field::<U16>(object, CLASS, "rank")?.0;
    let size = field::<U16>(object, CLASS, "size")?.0;
    match by.as_str() {
        "heads" => Ok(Sharding::Heads { rank, size }),
        "replicated" => Ok(Sharding::Replicated { rank, size }),
        "tokens" => Ok(Sharding::Tokens { rank, size }),
        _ => Err(unknown("sharding", &by, &["heads", "replicated", "tokens"])),
    }
}

fn plane_spec(object: &Bound<'_, PyAny>) -> PyResult<PlaneSpec> {
    const CLASS: &str = "Plane";
    let layer: String = field(object, CLASS, "layer")?;
    let kind = parse_kind(&field::<String>(object, CLASS, "kind")?)?;
    let mut spec = PlaneSpec::new(field::<U16>(object, CLASS, "group")?.0, layer, kind)
        .region(field::<U32>(object, CLASS, "region")?.0);
    let number = |name: &str| field::<Option<U64>>(object, CLASS, name).map(|number| number.map(|number| number.0));
    if let Some(base) = number("base")? {
        spec = spec.base(base);
    }
    if let Some(stride) = number("stride")? {
        spec = spec.stride(stride);
    }
    if let Some(length) = number("block_length")? {
        spec = spec.block_length(length);
    }
    if let Some((start, end)) = field::<Option<(U32, U32)>>(object, CLASS, "heads")? {
        spec = spec.heads(start.0..end.0);
    }
    let order: Bound<'_, PyAny> = field(object, CLASS, "order")?;
    if !order.is_none() {
        spec = spec.order(parse_order(&order)?);
    }
    Ok(spec)
}

fn parse_dtype(name: &str) -> PyResult<DType> {
    let known = DTYPES.iter().find(|dtype| dtype.name() == name);
    known
        .copied()
        .ok_or_else(|| unknown("dtype", name, &DTYPES.map(DType::name)))
}

fn parse_kind(name: &str) -> PyResult<PlaneKind> {
    match name {
        "key" => Ok(PlaneKind::Key),
        "value" => Ok(PlaneKind::Value),
        "fused" => Ok(PlaneKind::Fused),
        "latent" => Ok(PlaneKind::Latent),
        "state" => Ok(PlaneKind::State),
        _ => Err(unknown(
            "plane kind",
            name,
            &["key", "value", "fused", "latent", "state"],
        )),
    }
}

fn kind_name(kind: PlaneKind) -> &'static str {
    match kind {
        PlaneKind::Key => "key",
        PlaneKind::Value => "value",
        PlaneKind::Fused => "fused",
        PlaneKind::Latent => "latent",
        PlaneKind::State => "state",
    }
}

fn parse_order(object: &Bound<'_, PyAny>) -> PyResult<InnerOrder> {
    if object.is_instance_of::<PyString>() {
        let name: String = object.extract()?;
        return match name.as_str() {
            "NHD" => Ok(InnerOrder::NHD),
            "HND" => Ok(InnerOrder::HND),
            "KV_NHD" => Ok(InnerOrder::KV_NHD),
            "KV_HND" => Ok(InnerOrder::KV_HND),
            "rows" => Ok(InnerOrder::ROWS),
            "packed" => Ok(InnerOrder::Packed),
            _ => Err(unknown(
                "order",
                &name,
                &["NHD", "HND", "KV_NHD", "KV_HND", "rows", "packed"],
            )),
        };
    }
    let axes: Vec<String> = object.extract().map_err(|_| {
        PyTypeError::new_err(format!(
            "an order is a name or a tuple of axes, not {}",
            type_name(object)
        ))
    })?;
    let axes = axes
        .iter()
        .map(|axis| parse_axis(axis))
        .collect::<PyResult<Vec<Axis>>>()?;
    match *axes {
        [a, b] => Ok(InnerOrder::Latent([a, b])),
        [a, b, c] => Ok(InnerOrder::Single([a, b, c])),
        [a, b, c, d] => Ok(InnerOrder::Fused([a, b, c, d])),
        _ => Err(invalid(
            format!("an order of {} axes", axes.len()),
            "latent planes have 2, K and V planes 3, fused planes 4",
            "name the axes inside a block, outermost first",
        )),
    }
}

fn parse_axis(name: &str) -> PyResult<Axis> {
    match name {
        "kv" => Ok(Axis::Kv),
        "head" => Ok(Axis::Head),
        "token" => Ok(Axis::Token),
        "dim" => Ok(Axis::Dim),
        _ => Err(unknown("axis", name, &["kv", "head", "token", "dim"])),
    }
}

fn parse_arrangement(name: &str) -> PyResult<Arrangement> {
    let known = || {
        unknown(
            "arrangement",
            name,
            &[
                "per_layer_nhd",
                "fused_nhd",
                "block_major_nhd",
                "per_head_nhd",
                "and _hnd of each",
            ],
        )
    };
    let (planes, order) = name.rsplit_once('_').ok_or_else(known)?;
    let planes = match planes {
        "per_layer" => PlaneArrangement::PerLayer,
        "fused" => PlaneArrangement::Fused,
        "block_major" => PlaneArrangement::BlockMajor,
        "per_head" => PlaneArrangement::PerHead,
        _ => return Err(known()),
    };
    let order = match order {
        "nhd" => HeadOrder::Nhd,
        "hnd" => HeadOrder::Hnd,
        _ => return Err(known()),
    };
    Ok(Arrangement { planes, order })
}

pub(crate) fn unknown(what: &str, given: &str, known: &[&str]) -> PyErr {
    invalid(
        format!("{what} {given:?}"),
        format!("it is none of {}", known.join(", ")),
        "use one of them",
    )
}
