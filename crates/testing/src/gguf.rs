//! Writes GGUF files for tests, good ones and bad ones.

/// A GGUF file under construction.
#[derive(Debug, Clone, Default)]
pub struct Gguf {
    values: Vec<(String, Vec<u8>)>,
    tensors: Vec<Tensor>,
    alignment: Option<usize>,
}

#[derive(Debug, Clone)]
struct Tensor {
    name: String,
    dimensions: Vec<u64>,
    kind: u32,
    data: Vec<u8>,
    /// Replaces the right one.
    offset: Option<u64>,
}

/// A length and the bytes.
fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

impl Gguf {
    /// A value of any type by its number in the format: `type`, then `bytes`. Replaces an earlier
    /// value of this key.
    pub fn value(mut self, key: &str, kind: u32, bytes: &[u8]) -> Self {
        self.values.retain(|(known, _)| known != key);
        self.values.push((key.to_owned(), [&kind.to_le_bytes(), bytes].concat()));
        self
    }

    /// Leaves out a value.
    pub fn without(mut self, key: &str) -> Self {
        self.values.retain(|(known, _)| known != key);
        self
    }

    /// A u32.
    pub fn number(self, key: &str, number: u32) -> Self {
        self.value(key, 4, &number.to_le_bytes())
    }

    /// An f32.
    pub fn float(self, key: &str, number: f32) -> Self {
        self.value(key, 6, &number.to_le_bytes())
    }

    /// True or false.
    pub fn bool(self, key: &str, value: bool) -> Self {
        self.value(key, 7, &[u8::from(value)])
    }

    /// A text.
    pub fn text(self, key: &str, value: &str) -> Self {
        self.value(key, 8, &text(value))
    }

    /// A list of texts.
    pub fn texts<S: AsRef<str>>(self, key: &str, texts: &[S]) -> Self {
        let items: Vec<u8> = texts.iter().flat_map(|item| text(item.as_ref())).collect();
        self.list(key, 8, texts.len() as u64, &items)
    }

    /// A list of i32.
    pub fn numbers(self, key: &str, numbers: &[i32]) -> Self {
        let items: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.list(key, 5, numbers.len() as u64, &items)
    }

    /// A list that claims to have `count` items of a type.
    pub fn list(self, key: &str, kind: u32, count: u64, items: &[u8]) -> Self {
        self.value(key, 9, &[&kind.to_le_bytes(), &count.to_le_bytes()[..], items].concat())
    }

    /// Where tensors begin, in multiples of this; also written to the metadata.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = Some(bytes);
        self.number("general.alignment", bytes as u32)
    }

    /// A tensor of a type by its number; the innermost dimension first. Replaces an earlier one.
    pub fn tensor(mut self, name: &str, dimensions: &[u64], kind: u32, data: Vec<u8>) -> Self {
        self.tensors.retain(|tensor| tensor.name != name);
        let (name, dimensions) = (name.to_owned(), dimensions.to_vec());
        self.tensors.push(Tensor { name, dimensions, kind, data, offset: None });
        self
    }

    /// A tensor of f32 numbers.
    pub fn floats(self, name: &str, dimensions: &[u64], numbers: &[f32]) -> Self {
        self.tensor(name, dimensions, 0, numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
    }

    /// Leaves out a tensor.
    pub fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// Changes the file's description of a tensor, not its data.
    ///
    /// # Panics
    /// When there is no such tensor.
    pub fn edit(mut self, name: &str, edit: impl FnOnce(&mut Vec<u64>, &mut u32, &mut Option<u64>)) -> Self {
        let tensor = self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
        edit(&mut tensor.dimensions, &mut tensor.kind, &mut tensor.offset);
        self
    }

    /// The same tensor once more.
    ///
    /// # Panics
    /// When there is no such tensor.
    pub fn twice(mut self, name: &str) -> Self {
        let tensor = self.tensors.iter().find(|tensor| tensor.name == name).unwrap().clone();
        self.tensors.push(tensor);
        self
    }

    /// The same value once more.
    ///
    /// # Panics
    /// When there is no such value.
    pub fn value_twice(mut self, key: &str) -> Self {
        let value = self.values.iter().find(|(known, _)| known == key).unwrap().clone();
        self.values.push(value);
        self
    }

    /// Changes the name of a tensor or the key of a value.
    pub fn rename(mut self, from: &str, to: &str) -> Self {
        for name in self
            .tensors
            .iter_mut()
            .map(|tensor| &mut tensor.name)
            .chain(self.values.iter_mut().map(|v| &mut v.0))
        {
            if name == from {
                to.clone_into(name);
            }
        }
        self
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            file.extend(text(key));
            file.extend(value);
        }
        let alignment = self.alignment.unwrap_or(32);
        let mut place = 0;
        for tensor in &self.tensors {
            file.extend(text(&tensor.name));
            file.extend((tensor.dimensions.len() as u32).to_le_bytes());
            file.extend(tensor.dimensions.iter().flat_map(|size| size.to_le_bytes()));
            file.extend(tensor.kind.to_le_bytes());
            file.extend(tensor.offset.unwrap_or(place as u64).to_le_bytes());
            place = (place + tensor.data.len()).next_multiple_of(alignment);
        }
        for tensor in &self.tensors {
            file.resize(file.len().next_multiple_of(alignment), 0);
            file.extend(&tensor.data);
        }
        file
    }
}
