//! Settings as a nested dict.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyString};
use toml::{Table, Value};

use crate::arguments::type_name;

/// The dict as TOML text: one parser, and one set of messages, for all ways to configure.
pub(crate) fn table(settings: &Bound<'_, PyDict>) -> PyResult<String> {
    Ok(to_table(settings)?.to_string())
}

fn to_table(settings: &Bound<'_, PyDict>) -> PyResult<Table> {
    let mut table = Table::new();
    for (key, value) in settings {
        let key: String = key
            .extract()
            .map_err(|_| PyTypeError::new_err(format!("a setting's name is a str, not {}", type_name(&key))))?;
        let value = to_value(&key, &value)?;
        table.insert(key, value);
    }
    Ok(table)
}

fn to_value(key: &str, value: &Bound<'_, PyAny>) -> PyResult<Value> {
    if let Ok(inner) = value.cast::<PyDict>() {
        return Ok(Value::Table(to_table(inner)?));
    }
    if value.is_instance_of::<PyBool>() {
        return Ok(Value::Boolean(value.extract()?));
    }
    if value.is_instance_of::<PyInt>() {
        return Ok(Value::Integer(value.extract()?));
    }
    if value.is_instance_of::<PyString>() {
        return Ok(Value::String(value.extract()?));
    }
    if let Ok(items) = value.extract::<Vec<String>>() {
        return Ok(Value::Array(items.into_iter().map(Value::String).collect()));
    }
    Err(PyTypeError::new_err(format!(
        "setting {key}: a number, a text, a list of texts or a dict, not {}",
        type_name(value)
    )))
}

/// All settings with their defaults, ranges and meanings, as a Markdown table; the keys are those of the TOML file and
/// of a `config` dict.
#[pyfunction]
pub(crate) fn config_reference() -> String {
    kvxfer::Config::reference()
}
