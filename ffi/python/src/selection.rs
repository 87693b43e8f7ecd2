//! Selections and targets as Python gives them: their classes, or plain tuples.

use std::borrow::Cow;

use kvxfer::layout::HeadRange;
use kvxfer::{BlockDescriptor, GroupSelection, Scope, Target};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::arguments::{U16, U32, blocks, type_name};

/// What of a request is meant: per cache group the tokens, and the blocks that hold them.
///
/// `Selection(first_token, token_end, blocks)` for pools with one cache group, `Selection(groups=[(first_token,
/// token_end, blocks), ...])` for others. Block ids are any sequence of integers, or a buffer of 32- or 64-bit ones.
#[pyclass(frozen, module = "kvxfer", name = "Selection", eq)]
#[derive(PartialEq, Eq)]
pub(crate) struct Selection {
    inner: kvxfer::Selection,
}

#[pymethods]
impl Selection {
    #[new]
    #[pyo3(signature = (first_token = None, token_end = None, blocks = None, *, groups = None))]
    fn new(
        first_token: Option<U32>,
        token_end: Option<U32>,
        blocks: Option<&Bound<'_, PyAny>>,
        groups: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Selection> {
        let inner = match (first_token, token_end, blocks, groups) {
            (Some(first), Some(end), Some(list), None) => {
                kvxfer::Selection::single(first.0, end.0, crate::arguments::blocks(list)?)
            }
            (None, None, None, Some(groups)) => from_groups(groups)?,
            _ => {
                return Err(PyTypeError::new_err(
                    "Selection takes first_token, token_end and blocks, or groups=[(first_token, token_end, blocks), ...]",
                ));
            }
        };
        Ok(Selection { inner })
    }

    /// All blocks given, as if each held `tokens_per_block` tokens from position 0 on: what opaque pools want.
    #[staticmethod]
    fn whole_blocks(tokens_per_block: U32, blocks: &Bound<'_, PyAny>) -> PyResult<Selection> {
        let inner = kvxfer::Selection::whole_blocks(tokens_per_block.0, crate::arguments::blocks(blocks)?);
        Ok(Selection { inner })
    }

    /// Per cache group: first token, token end, block ids.
    #[getter]
    fn groups(&self) -> Vec<(u32, u32, Vec<u32>)> {
        let groups = self.inner.groups.iter();
        groups
            .map(|group| (group.first_token, group.token_end, group.blocks.clone()))
            .collect()
    }

    fn __repr__(&self) -> String {
        let groups: Vec<String> = self
            .inner
            .groups
            .iter()
            .map(|group| {
                format!(
                    "tokens {}..{} in {} blocks",
                    group.first_token,
                    group.token_end,
                    group.blocks.len()
                )
            })
            .collect();
        format!("<kvxfer.Selection {}>", groups.join("; "))
    }
}

/// A selection from its class, a tuple `(first_token, token_end, blocks)`, or a list of those (one per cache group).
pub(crate) fn selection<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<Cow<'a, kvxfer::Selection>> {
    if let Ok(selection) = object.cast::<Selection>() {
        return Ok(Cow::Borrowed(&selection.get().inner));
    }
    if let Ok(tuple) = object.cast::<PyTuple>()
        && tuple.len() == 3
        && !tuple.get_item(0)?.is_instance_of::<PyTuple>()
    {
        return Ok(Cow::Owned(kvxfer::Selection {
            groups: vec![from_tuple(tuple)?],
        }));
    }
    if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
        return from_groups(object).map(Cow::Owned);
    }
    Err(PyTypeError::new_err(format!(
        "a selection is a kvxfer.Selection, (first_token, token_end, blocks) or a list of those, not {}",
        type_name(object)
    )))
}

fn from_groups(groups: &Bound<'_, PyAny>) -> PyResult<kvxfer::Selection> {
    let mut selection = kvxfer::Selection::default();
    for group in groups.try_iter()? {
        let group = group?;
        let tuple = group
            .cast::<PyTuple>()
            .ok()
            .filter(|tuple| tuple.len() == 3)
            .ok_or_else(|| {
                PyTypeError::new_err(format!(
                    "a cache group's part of a selection is (first_token, token_end, blocks), not {}",
                    type_name(&group)
                ))
            })?;
        selection.groups.push(from_tuple(tuple)?);
    }
    Ok(selection)
}

fn from_tuple(tuple: &Bound<'_, PyTuple>) -> PyResult<GroupSelection> {
    Ok(GroupSelection {
        first_token: tuple.get_item(0)?.extract::<U32>()?.0,
        token_end: tuple.get_item(1)?.extract::<U32>()?.0,
        blocks: blocks(&tuple.get_item(2)?)?,
    })
}

/// What a grant covers, or one side of a push or pull: a selection, some of the pool's layers, some of its heads.
/// A plain selection stands for all layers and heads.
///
/// `layers` are indices in the layout's layers, ascending; `heads` are `(start, end)` per cache group.
#[pyclass(frozen, module = "kvxfer", name = "Target")]
pub(crate) struct PyTarget {
    inner: Target,
}

#[pymethods]
impl PyTarget {
    #[new]
    #[pyo3(signature = (selection, layers = None, heads = None))]
    fn new(
        selection: &Bound<'_, PyAny>,
        layers: Option<Vec<U16>>,
        heads: Option<Vec<(U32, U32)>>,
    ) -> PyResult<PyTarget> {
        let selection = crate::selection::selection(selection)?.into_owned();
        let scope = Scope {
            layers: layers.unwrap_or_default().into_iter().map(|layer| layer.0).collect(),
            heads: heads.map(|heads| {
                let ranges = heads.into_iter();
                ranges.map(|(start, end)| HeadRange::new(start.0, end.0)).collect()
            }),
        };
        Ok(PyTarget {
            inner: Target::Selection { selection, scope },
        })
    }

    fn __repr__(&self) -> String {
        match &self.inner {
            Target::Selection { selection, scope } => {
                let layers = match scope.layers.as_slice() {
                    [] => "all".to_owned(),
                    layers => format!("{layers:?}"),
                };
                let heads = scope.heads.as_ref().map(|heads| {
                    let ranges: Vec<(u32, u32)> = heads.iter().map(|heads| (heads.start, heads.end)).collect();
                    format!("{ranges:?}")
                });
                format!(
                    "<kvxfer.Target {} cache groups, layers: {layers}, heads: {}>",
                    selection.groups.len(),
                    heads.as_deref().unwrap_or("all")
                )
            }
            Target::Descriptors(descriptors) => format!("<kvxfer.Target {} descriptors>", descriptors.len()),
        }
    }
}

/// A target: its class, anything that is a selection, or a list of descriptors `(plane, block, offset, length)`.
pub(crate) fn target(object: &Bound<'_, PyAny>) -> PyResult<Target> {
    if let Ok(target) = object.cast::<PyTarget>() {
        return Ok(target.get().inner.clone());
    }
    if let Ok(list) = object.cast::<PyList>()
        && let Ok(first) = list.get_item(0)
        && let Ok(first) = first.cast::<PyTuple>()
        && first.len() == 4
    {
        let descriptors = list.iter().map(|item| {
            let (plane, block, offset, length): (U32, U32, U32, U32) = item.extract()?;
            Ok(BlockDescriptor {
                plane: plane.0,
                block: block.0,
                offset: offset.0,
                length: length.0,
            })
        });
        return Ok(Target::Descriptors(descriptors.collect::<PyResult<Vec<_>>>()?));
    }
    Ok(selection(object)?.into_owned().into())
}
